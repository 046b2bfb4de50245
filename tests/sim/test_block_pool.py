"""Block pool and prefix cache against the simplest thing that could be right, under any order of calls."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from shared.prefix_keys import KEY_BYTES, following_keys
from tests.examples import examples

NUM_BLOCKS = 12


def _column(blocks: list[int]) -> IndexArray:
    return np.array(blocks, np.intp)


class BlockPoolMachine(RuleBasedStateMachine):
    """Block tables come and go while steps are sent and completed; some blocks are cached and shared."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[list[int]] = []
        self.last_step = self.answered = 0
        self.named_until: dict[int, int] = {}
        """For each block, the last step in which a table contained it."""
        self.chains: list[list[int]] = []
        """Blocks that were published one after the other and still can be found."""
        self.keys: dict[int, bytes] = {}
        """By block of a chain, its key."""
        self.num_keys = 0

    @rule(target=tables, data=st.data())
    def take(self, data: st.DataObject) -> list[int]:
        """Give a table blocks that no table holds and no unanswered step names."""
        count = data.draw(st.integers(0, self.pool.num_available))
        blocks: list[int] = self.pool.take(count).tolist()
        held = {block for table in self.live for block in table}
        assert len(set(blocks)) == count
        assert held.isdisjoint(blocks)
        for block in blocks:
            assert self.named_until.get(block, 0) <= self.answered, "a block is reused too early"
            self.forgotten(block)
            assert not self.pool.cache.holds[block], "its memory is given away, its key must be gone"
        self.live.append(blocks)
        return blocks

    @rule(table=tables)
    def publish(self, table: list[int]) -> None:
        """Make a table's blocks shareable under unique keys."""
        if table not in self.live:
            return
        fresh = [block for block in table if block not in self.keys]
        for block in fresh:
            self.num_keys += 1
            self.keys[block] = self.num_keys.to_bytes(KEY_BYTES, "big")
        self.pool.cache.publish(b"".join(self.keys[block] for block in fresh), _column(fresh))
        self.chains.append(fresh)

    @rule(target=tables, data=st.data())
    @precondition(lambda self: self.keys)
    def share(self, data: st.DataObject) -> list[int]:
        """Another table shares a cached chain or its prefix, in any block state."""
        chain = data.draw(st.sampled_from([chain for chain in self.chains if chain]))
        blocks = chain[: data.draw(st.integers(1, len(chain)))]
        assert self.pool.cache.match(b"".join(self.keys[block] for block in blocks)).tolist() == blocks
        self.pool.share(_column(blocks))
        self.live.append(blocks)
        return blocks

    @rule(table=consumes(tables))
    def release(self, table: list[int]) -> None:
        """A table is released; steps in flight may still use its blocks."""
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
        """Mark cached blocks as invalid: no request finds them any more, and the sharing requests have left."""
        blocks = data.draw(st.lists(st.sampled_from(self.unshared_keys()), unique=True, min_size=1))
        self.pool.distrust(_column(blocks))
        for block in blocks:
            self.forgotten(block)

    def forgotten(self, block: int) -> None:
        """A block is found no more, and neither is what follows it in its chain."""
        for chain in self.chains:
            if block in chain:
                index = chain.index(block)
                keys = b"".join(self.keys[each] for each in chain)
                assert self.pool.cache.match(keys).tolist() == chain[: len(self.pool.cache.match(keys))]
                for gone in chain[index:]:
                    assert not self.pool.cache.holds[gone]
                    del self.keys[gone]
                del chain[index:]

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
    """Sequences are cached, dropped and computed; a dict from prefixes to blocks defines what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS)
        self.known: dict[tuple[int, ...], int] = {}
        self.next_keys: dict[int, bytes] = {}

    sequences = st.lists(st.integers(0, 2), max_size=6).map(tuple)
    """One number per block; all sequences together form a tree with many branches."""

    @rule(sequence=sequences, data=st.data())
    def publish(self, sequence: tuple[int, ...], data: st.DataObject) -> None:
        """The first block cached for a prefix keeps it; other blocks for that prefix stay unknown."""
        unused = sorted(set(range(NUM_BLOCKS)) - set(self.known.values()))
        sequence = sequence[: len(unused)]
        blocks = data.draw(st.permutations(unused))[: len(sequence)]
        self.cache.publish(_keys(sequence), _column(list(blocks)))
        for length, block in enumerate(blocks, start=1):
            self.known.setdefault(sequence[:length], block)

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    def forget(self, blocks: list[int]) -> None:
        """Dropped blocks, and those that follow them, are no longer found; `forget` lists these blocks."""
        roots = [prefix for prefix, block in self.known.items() if block in blocks]
        gone = [p for p in self.known if any(p[: len(root)] == root for root in roots)]
        assert sorted(self.cache.forget(_column(blocks)).tolist()) == sorted(self.known.pop(prefix) for prefix in gone)

    @rule(sequence=sequences)
    def match(self, sequence: tuple[int, ...]) -> None:
        """A match is the longest known beginning of a sequence."""
        prefixes = (sequence[:length] for length in range(1, len(sequence) + 1))
        expected = [self.known[prefix] for prefix in itertools.takewhile(self.known.__contains__, prefixes)]
        assert self.cache.match(_keys(sequence)).tolist() == expected

    @rule(row=st.integers(0, 3), sequence=sequences)
    def compute(self, row: int, sequence: tuple[int, ...]) -> None:
        """A key is pending exactly while some row computes it next."""
        key = _keys(sequence)[-KEY_BYTES:]
        self.cache.computes_next(row, key)
        self.next_keys[row] = key
        for pending in self.next_keys.values():
            assert self.cache.is_pending(pending) == bool(pending)
        assert self.cache.is_pending(_keys((9,))) is False

    @invariant()
    def agrees(self) -> None:
        """The cache is sound and holds exactly the blocks that the dict has."""
        self.cache.validate()
        assert np.flatnonzero(self.cache.holds).tolist() == sorted(self.known.values())


def _keys(sequence: tuple[int, ...]) -> bytes:
    return following_keys(b"root", np.array(sequence, np.int32).tobytes(), 1)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
