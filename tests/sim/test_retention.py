"""Retained blocks: eviction in order of level and use, and shares of tenants, under any order of calls."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.block_pool import BlockPool
from shared.prefix_keys import KEY_BYTES
from tests.examples import examples

_NUM_BLOCKS = 24
_SHARE = 0.5
_TENANTS = ("a", "b", "c")


class RetentionMachine(RuleBasedStateMachine):
    """Chains of blocks are cached, used, retained and evicted; two tenants share each chain."""

    share = _SHARE

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(_NUM_BLOCKS, retention_share=self.share)
        self.most = int(self.share * _NUM_BLOCKS)
        self.now = 0.0
        self.num_uses = 0
        self.num_keys = 0
        self.chains: list[tuple[tuple[str, ...], list[int]]] = []
        """Tenants and cached blocks of each chain."""
        self.used: dict[int, tuple[int, int]] = {}
        """By cached block, the time of its last use, and its negated position."""
        self.claims: dict[tuple[int, str], tuple[float, int]] = {}
        """By block and tenant, the time until which a request wanted to retain it, and the highest level."""

    @rule(absent=st.sampled_from(_TENANTS), count=st.integers(1, 6))
    def publish(self, absent: str, count: int) -> None:
        """A request caches a new chain."""
        blocks = self._take(count)
        keys = b"".join((self.num_keys + each + 1).to_bytes(KEY_BYTES, "big") for each in range(count))
        self.num_keys += count
        self.pool.cache.publish(keys, blocks)
        self.pool.release(blocks, last_step=0, answered_step=0)
        self.chains.append((tuple(each for each in _TENANTS if each != absent), blocks.tolist()))
        self._use(blocks.tolist())

    @rule(count=st.integers(1, _NUM_BLOCKS))
    def evict(self, count: int) -> None:
        """A request takes blocks and leaves without caching them."""
        self.pool.release(self._take(count), last_step=0, answered_step=0)

    @rule(data=st.data())
    @precondition(lambda self: self.chains)
    def use(self, data: st.DataObject) -> None:
        """A request uses the beginning of a chain."""
        _, chain = data.draw(st.sampled_from(self.chains))
        blocks = chain[: data.draw(st.integers(1, len(chain)))]
        self.pool.share(np.array(blocks, np.intp))
        self.pool.release(np.array(blocks, np.intp), last_step=0, answered_step=0)
        self._use(blocks)

    @rule(data=st.data(), priority=st.integers(0, 9), time=st.integers(1, 5))
    @precondition(lambda self: self.chains)
    def retain(self, data: st.DataObject, priority: int, time: int) -> None:
        """A request retains the beginning of a chain: no less than before for its blocks, and no other tenant loses."""
        tenants, chain = data.draw(st.sampled_from(self.chains))
        tenant = data.draw(st.sampled_from(tenants))
        blocks = chain[: data.draw(st.integers(1, len(chain)))]
        before = {each: self._num_held(each) for each in _TENANTS}
        self.pool.retain(np.array(blocks, np.intp), tenant, priority, self.now + time)
        for block in blocks:
            until, level = self.claims.get((block, tenant), (0.0, 0))
            self.claims[block, tenant] = max(until, self.now + time), max(level, priority + 1)
        own = [self._levels()[block] for block in blocks]
        assert all(own[: len(own) - own.count(0)]), "a block is retained without the blocks before it"
        assert all(not each or each >= priority + 1 for each in own)
        for other in _TENANTS:
            lost = before[other] - self._num_held(other)
            if lost > 0 and other != tenant:
                num_tenants = sum(bool(self._num_held(each)) for each in _TENANTS)
                assert self._num_held(other) >= self.most // num_tenants, "a tenant lost blocks of its equal part"
                assert self._num_held(tenant) <= self._num_held(other) + 1, "a larger tenant displaced it"
        if 0 in own:
            assert sum(map(self._num_held, _TENANTS)) > self.most - len(_TENANTS), "there was room to retain more"

    @rule(time=st.integers(1, 4))
    def pass_time(self, time: int) -> None:
        """Retentions end when they are due, and no earlier."""
        before = self._levels()
        self.now += time
        self.pool.end_retention(self.now)
        due = {block for (block, _), (until, _) in self.claims.items() if until <= self.now}
        self.claims = {key: claim for key, claim in self.claims.items() if claim[0] > self.now}
        for block, level in enumerate(self._levels()):
            assert level == before[block] or block in due, "a retention ends early"

    def _take(self, count: int) -> IndexArray:
        """Take blocks; check that the right ones were evicted."""
        levels = self._levels()
        order = sorted(self.used, key=lambda block: (levels[block], *self.used[block]))
        num_evicted = max(0, count - self.pool.num_free)
        blocks = self.pool.take(count)
        gone = {block for block in self.used if not self.pool.cache.holds[block]}
        assert gone == set(order[:num_evicted])
        for block in gone:
            del self.used[block]
        self.claims = {key: claim for key, claim in self.claims.items() if key[0] not in gone}
        self.chains = [(tenants, [each for each in chain if each not in gone]) for tenants, chain in self.chains]
        self.chains = [each for each in self.chains if each[1]]
        return blocks

    def _use(self, blocks: list[int]) -> None:
        self.num_uses += 1
        self.used.update((block, (self.num_uses, -position)) for position, block in enumerate(blocks))

    def _levels(self) -> list[int]:
        found: list[int] = self.pool.retention.levels(np.arange(_NUM_BLOCKS)).tolist()
        return found

    def _num_held(self, tenant: str) -> int:
        return self.pool.retention._by_tenant.get(tenant, 0)

    @invariant()
    def is_consistent(self) -> None:
        """All tables agree, and no more than the share is retained, at no higher level than requests asked for."""
        self.pool.validate([])
        assert sum(level > 0 for level in self._levels()) <= self.most
        for block, level in enumerate(self._levels()):
            wanted = [claim[1] for (of, _), claim in self.claims.items() if of == block]
            assert level <= max(wanted, default=0), "a block is retained for too long"
            if self.share == 1.0:
                assert level == max(wanted, default=0), "a tenant ended the retention of another one"


class AmpleMachine(RetentionMachine):
    """The same with room for all: each block is retained as long as one of its tenants wants."""

    share = 1.0


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestAmpleRoom = AmpleMachine.TestCase
TestAmpleRoom.settings = TestRetention.settings
