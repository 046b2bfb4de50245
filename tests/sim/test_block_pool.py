"""Block pool and prefix cache against the simplest thing that could be right, under any order of calls."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.events import Int32Array
from scheduler_svc.core.prefix_cache import PrefixCache

NUM_BLOCKS = 12


def _column(blocks: list[int]) -> Int32Array:
    return np.array(blocks, np.int32)


class BlockPoolMachine(RuleBasedStateMachine):
    """Block tables come and go while steps are sent and answered; some blocks are published and shared."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[list[int]] = []
        self.last_step = self.answered = 0
        self.named_until: dict[int, int] = {}
        """By block, the last step in which a table named it."""
        self.keys: dict[int, bytes] = {}
        """By block, the key that it was published with and that still counts."""
        self.num_keys = 0

    @rule(target=tables, data=st.data())
    def take(self, data: st.DataObject) -> list[int]:
        """A table gets blocks that nobody holds and that no unanswered step names."""
        count = data.draw(st.integers(0, self.pool.num_available))
        blocks: list[int] = self.pool.take(count).tolist()
        held = {block for table in self.live for block in table}
        assert len(set(blocks)) == count
        assert held.isdisjoint(blocks)
        for block in blocks:
            assert self.named_until.get(block, 0) <= self.answered, "a block is reused too early"
            self.keys.pop(block, None)
            assert not self.pool.cache.holds[block], "its memory is given away, its key must be gone"
        self.live.append(blocks)
        return blocks

    @rule(table=tables)
    def publish(self, table: list[int]) -> None:
        """A table's blocks become shareable under keys that nobody else has."""
        if table not in self.live:
            return
        fresh = [block for block in table if block not in self.keys]
        for block in fresh:
            self.num_keys += 1
            self.keys[block] = b"%d" % self.num_keys
        self.pool.cache.publish([self.keys[block] for block in fresh], _column(fresh))

    @rule(target=tables, data=st.data())
    @precondition(lambda self: self.keys)
    def share(self, data: st.DataObject) -> list[int]:
        """Another table shares published blocks, in whatever state they are; it finds them by their keys."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True, min_size=1))
        found = [self.pool.cache.match([self.keys[block]]).tolist() for block in blocks]
        assert found == [[block] for block in blocks]
        self.pool.share(_column(blocks))
        self.live.append(blocks)
        return blocks

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        """A table goes; steps in flight may still name its blocks."""
        self.live.remove(table)
        for block in table:
            self.named_until[block] = max(self.named_until.get(block, 0), self.last_step)
        self.pool.release(_column(table), last_step=self.last_step, answered_step=self.answered)

    @rule()
    def send_step(self) -> None:
        """A step is sent."""
        self.last_step += 1

    @rule()
    @precondition(lambda self: self.answered < self.last_step)
    def answer_step(self) -> None:
        """The oldest step in flight is answered."""
        self.answered += 1
        self.pool.step_answered(self.answered)

    @rule(data=st.data())
    @precondition(lambda self: self.unshared_keys())
    def distrust(self, data: st.DataObject) -> None:
        """Published blocks turn out to be wrong; nobody finds them any more. Those who shared them have left."""
        blocks = data.draw(st.lists(st.sampled_from(self.unshared_keys()), unique=True, min_size=1))
        self.pool.distrust(_column(blocks))
        for block in blocks:
            assert not len(self.pool.cache.match([self.keys.pop(block)]))

    def unshared_keys(self) -> list[int]:
        """Published blocks that at most one table holds."""
        return [block for block in sorted(self.keys) if sum(block in table for table in self.live) <= 1]

    @invariant()
    def blocks_are_conserved(self) -> None:
        """Free, cached, retired and held blocks are all there are, and the tables hold what is counted as held."""
        pool = self.pool
        pool.validate(self.live)
        held = {block for table in self.live for block in table}
        assert pool.num_free + pool.num_cached + pool.num_retired + len(held) == NUM_BLOCKS

    @invariant()
    def nothing_is_retired_without_steps_in_flight(self) -> None:
        """When every step is answered no block waits for one."""
        if self.answered == self.last_step:
            assert self.pool.num_retired == 0


class PrefixCacheMachine(RuleBasedStateMachine):
    """Chains of keys are published, forgotten and computed; a dict says what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS)
        self.known: dict[bytes, int] = {}
        self.next_keys: dict[int, bytes] = {}

    keys = st.integers(0, 15).map(lambda number: b"%d" % number)

    @rule(wanted=st.lists(keys, unique=True, max_size=6), data=st.data())
    def publish(self, wanted: list[bytes], data: st.DataObject) -> None:
        """The first block published under a key keeps it; other blocks with that key stay unknown."""
        unused = sorted(set(range(NUM_BLOCKS)) - set(self.known.values()))
        wanted = wanted[: len(unused)]
        blocks = data.draw(st.permutations(unused))[: len(wanted)]
        self.cache.publish(wanted, _column(list(blocks)))
        for key, block in zip(wanted, blocks, strict=True):
            self.known.setdefault(key, block)

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    def forget(self, blocks: list[int]) -> None:
        """Forgotten blocks are found no more, whether they were known or not."""
        self.cache.forget(_column(blocks))
        self.known = {key: block for key, block in self.known.items() if block not in blocks}

    @rule(chain=st.lists(keys, max_size=8))
    def match(self, chain: list[bytes]) -> None:
        """A match is the longest known beginning of a chain."""
        expected = []
        for key in chain:
            if key not in self.known:
                break
            expected.append(self.known[key])
        assert self.cache.match(chain).tolist() == expected

    @rule(row=st.integers(0, 3), key=st.none() | keys)
    def compute(self, row: int, key: bytes | None) -> None:
        """A key is pending exactly while some row computes it next."""
        self.cache.computes_next(row, key)
        self.next_keys.pop(row, None)
        if key is not None:
            self.next_keys[row] = key
        for number in range(16):
            assert self.cache.is_pending(b"%d" % number) == (b"%d" % number in self.next_keys.values())

    @invariant()
    def agrees(self) -> None:
        """Both directions agree with each other and with the dict."""
        self.cache.validate()
        assert len(self.cache) == len(self.known)
        assert np.flatnonzero(self.cache.holds).tolist() == sorted(self.known.values())


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
