"""KV blocks of one worker: who holds which, and when one may be handed out again.

A block is in exactly one of four states:

* *free*;
* *held* by block tables, counted;
* *retired*: nobody holds it any more, but a plan in flight may still read or write it. It counts as held towards the
  outside. (Freeing too early is the classic bug of asynchronous scheduling.)
* *cached*: nobody holds it, no plan names it, but its KV is in the prefix cache. It is handed out when no free one is
  left, least recently used first.

Invariant: free + cached + retired + held == total.

Prompts have hundreds of blocks, so all that is known of a block is one number, its *claim*, and every operation takes
many blocks at once. What is retired or cached together is one entry of a queue; a block that was taken up again
meanwhile is told by its claim, which names the entry.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.arrays import IndexArray, all_of, any_of
from scheduler_svc.core.prefix_cache import PrefixCache

_FREE = 0
_RETIRED = 1 << 40
"""A claim from 1 on is a number of holders; from here on it names an entry of what is retired, below 0 one of what is
cached."""
_NONE = np.array(0)
_ONE = np.array(1)
"""Comparing with an array takes half the time of comparing with a number."""


class BlockPool:
    """Blocks [0, num_blocks) with reference counts and deferred reuse."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        """With a cache of its own, of full blocks only, if none is given."""
        self.num_blocks = num_blocks
        self.cache = PrefixCache(num_blocks) if cache is None else cache
        # A stack: the most recently used block is handed out first, it is the likeliest to be in a hardware cache.
        self._free = np.arange(num_blocks, dtype=np.intp)
        self.num_free = num_blocks
        """Blocks that hold nothing."""
        self.num_cached = 0
        """Blocks that nobody holds and that the prefix cache knows."""
        self.num_retired = 0
        """Blocks that become available once the steps in flight are answered."""
        self._claims = np.zeros(num_blocks, np.int64)
        self._last_entry = 0
        self._eviction_batch = num_blocks // 512
        self._retired: deque[tuple[int, int, IndexArray]] = deque()
        """(last step that may touch them, claim, blocks), steps ascending."""
        self._cached: deque[tuple[int, IndexArray]] = deque()
        """(claim, blocks in order of position), least recently used first."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor cached."""
        return self.num_blocks - self.num_available

    def take(self, count: int) -> IndexArray:
        """Takes `count` blocks, each with one reference. The caller has checked `num_available`."""
        if count > self.num_free:
            assert count <= self.num_available, f"take({count}) with {self.num_available} available"
            self._evict(count - self.num_free)
        top = self.num_free
        self.num_free = top - count
        taken = self._free[self.num_free : top].copy()
        self._claims[taken] = 1
        return taken

    def count_idle(self, blocks: IndexArray) -> int:
        """How many of the blocks are cached and held by nobody."""
        return int(np.count_nonzero(self._claims[blocks] < 0)) if len(blocks) else 0

    def share(self, blocks: IndexArray) -> None:
        """Adds a reference to blocks that the prefix cache knows, in whatever state they are."""
        if not len(blocks):
            return
        assert all_of(self.cache.holds[blocks]), "share of a block that is not in the cache"
        claims = self._claims[blocks]
        cached, retired = claims < _NONE, claims >= _RETIRED
        self.num_cached -= int(np.count_nonzero(cached))
        self.num_retired -= int(np.count_nonzero(retired))
        claims[cached | retired] = 0
        self._claims[blocks] = claims + _ONE

    def read(self, blocks: IndexArray, *, last_step: int, answered_step: int) -> None:
        """Keeps blocks that the prefix cache knows until `last_step`, which reads them, is answered."""
        self.share(blocks)
        self.release(blocks, last_step=last_step, answered_step=answered_step)

    def release(self, blocks: IndexArray, *, last_step: int, answered_step: int) -> None:
        """Drops one reference of each block; those without any are retired until `last_step` is answered.

        Args:
            blocks: a block table or a part of one, in order of position; none twice.
            last_step: the last step that was sent to the worker.
            answered_step: the last step that was answered.
        """
        if not len(blocks):
            return
        claims = self._claims[blocks]
        if not all_of(claims == _ONE):
            assert claims.min() > 0, f"double free among {blocks}"
            assert claims.max() < _RETIRED, f"double free among {blocks}"
            claims -= _ONE
            self._claims[blocks] = claims
            blocks = blocks[claims == _NONE]
        if last_step <= answered_step:
            self._make_available(blocks)
        elif len(blocks):
            claim = _RETIRED + self._next_entry()
            self._claims[blocks] = claim
            self._retired.append((last_step, claim, blocks))
            self.num_retired += len(blocks)

    def step_answered(self, step: int) -> None:
        """Makes the blocks available that waited for `step`."""
        while self._retired and self._retired[0][0] <= step:
            _, claim, blocks = self._retired.popleft()
            due = self._still(claim, blocks)
            self.num_retired -= len(due)
            self._make_available(due)

    def distrust(self, blocks: IndexArray) -> None:
        """Takes a block table, or a part of one, out of the prefix cache: what was written to the blocks is wrong."""
        self._forget(blocks)

    def _still(self, claim: int, blocks: IndexArray) -> IndexArray:
        """Those of a queue's entry that were not taken up meanwhile."""
        stay = self._claims[blocks] == np.array(claim)
        return blocks if all_of(stay) else blocks[stay]

    def _make_available(self, blocks: IndexArray) -> None:
        known = self.cache.holds[blocks]
        num_known = known.tobytes().find(0)
        if num_known < 0:
            self._cache(blocks)
        elif any_of(known[num_known:]):
            self._cache(blocks[known])
            self._push_free(blocks[~known])
        else:
            # As a rule the last block, which is not full, is all that the cache does not know.
            self._cache(blocks[:num_known])
            self._push_free(blocks[num_known:])

    def _cache(self, blocks: IndexArray) -> None:
        if len(blocks):
            claim = -self._next_entry()
            self._claims[blocks] = claim
            self._cached.append((claim, blocks))
            self.num_cached += len(blocks)

    def _next_entry(self) -> int:
        self._last_entry += 1
        return self._last_entry

    def _push_free(self, blocks: IndexArray) -> None:
        top = self.num_free
        self.num_free = top + len(blocks)
        self._free[top : self.num_free] = blocks
        self._claims[blocks] = _FREE

    def _evict(self, count: int) -> None:
        """Frees at least `count` cached blocks, least recently used first."""
        wanted = self.num_free + count
        while (short := wanted - self.num_free) > 0:
            claim, blocks = self._cached.popleft()
            idle = self._still(claim, blocks)
            # A few more than are short, in large pools: what was cached together is mostly forgotten as a whole.
            most = short + self._eviction_batch
            if len(idle) > most:
                # Of a chain, the end must leave the cache before the beginning.
                self._cached.appendleft((claim, idle[:-most]))
                idle = idle[-most:]
            self._forget(idle)

    def _forget(self, blocks: IndexArray) -> None:
        """Takes blocks out of the cache, with those that would not be found without them; idle ones become free."""
        gone = self.cache.forget(blocks)
        idle = self._claims[gone] < _NONE
        if not all_of(idle):
            gone = gone[idle]
        self.num_cached -= len(gone)
        self._push_free(gone)

    def validate(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks conservation against the block tables that should hold all references."""
        references = np.zeros(self.num_blocks, np.int64)
        for table in tables:
            for block in table:
                references[block] += 1
        claims = self._claims
        is_held = (claims > 0) & (claims < _RETIRED)
        assert np.array_equal(references, np.where(is_held, claims, 0)), "references differ from the block tables"
        free, retired, cached = claims == _FREE, claims >= _RETIRED, claims < 0
        counted = tuple(int(np.count_nonzero(state)) for state in (free, retired, cached))
        assert counted == (self.num_free, self.num_retired, self.num_cached), "miscounted blocks"
        stack = sorted(self._free[: self.num_free].tolist())
        assert stack == np.flatnonzero(free).tolist(), "a block is free twice or lost"
        assert self.cache.holds[cached].all()
        assert not self.cache.holds[free].any()
        assert self.cache.holds[references > 1].all(), "a block is shared that is not in the cache"
        entries = [(claim, blocks) for _, claim, blocks in self._retired] + list(self._cached)
        waiting = sum(int(np.count_nonzero(claims[blocks] == claim)) for claim, blocks in entries)
        assert waiting == self.num_retired + self.num_cached, "a block waits in no queue"
        self.cache.validate()
