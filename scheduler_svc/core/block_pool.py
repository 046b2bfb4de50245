"""KV blocks of one worker: who holds which, and when one may be handed out again.

A block is in exactly one of four states:

* *free*;
* *held* by block tables, counted;
* *retired*: nobody holds it any more, but a plan in flight may still read or write it. It counts as held towards the
  outside. (Freeing too early is the classic bug of asynchronous scheduling.)
* *cached*: nobody holds it, no plan names it, but its KV is in the prefix cache. It is handed out when no free one is
  left, least recently used first.

Invariant: free + cached + retired + held == total.

Prompts have hundreds of blocks, so states are arrays and every operation takes many blocks at once. What is retired or
cached together is one entry of a queue; a block that was taken up again meanwhile is told by its *stamp*, which every
such entry has its own of.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.arrays import IndexArray, all_of
from scheduler_svc.core.prefix_cache import PrefixCache

_FREE, _HELD, _RETIRED, _CACHED = range(4)


class BlockPool:
    """Blocks [0, num_blocks) with reference counts and deferred reuse."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        """With a cache of its own, of full blocks only, if none is given."""
        self.num_blocks = num_blocks
        self.cache = PrefixCache(num_blocks) if cache is None else cache
        # A stack: the most recently used block is handed out first, it is the likeliest to be in a hardware cache.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._counts = [num_blocks, 0, 0, 0]
        """Blocks by state, held ones not counted."""
        self._state = np.zeros(num_blocks, np.int8)
        self._references = np.zeros(num_blocks, np.int32)
        self._stamp = np.zeros(num_blocks, np.int64)
        self._next_stamp = 1
        self._eviction_batch = num_blocks // 512
        self._retired: deque[tuple[int, int, IndexArray]] = deque()
        """(last step that may touch them, stamp, blocks), steps ascending."""
        self._cached: deque[tuple[int, IndexArray]] = deque()
        """(stamp, blocks), least recently used first."""

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return self._counts[_FREE] + self._counts[_CACHED]

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._counts[_FREE]

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that the prefix cache knows."""
        return self._counts[_CACHED]

    @property
    def num_retired(self) -> int:
        """Blocks that become available once the steps in flight are answered."""
        return self._counts[_RETIRED]

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor cached."""
        return self.num_blocks - self.num_available

    def take(self, count: int) -> IndexArray:
        """Takes `count` blocks, each with one reference. The caller has checked `num_available`."""
        assert count <= self.num_available, f"take({count}) with {self.num_available} available"
        if count > self._counts[_FREE]:
            self._evict(count - self._counts[_FREE])
        top = self._counts[_FREE]
        taken = self._free[top - count : top][::-1].copy()
        self._counts[_FREE] -= count
        self._state[taken] = _HELD
        self._references[taken] = 1
        return taken

    def count_idle(self, blocks: IndexArray) -> int:
        """How many of the blocks are cached and held by nobody."""
        return int(np.count_nonzero(self._state[blocks] == _CACHED)) if len(blocks) else 0

    def share(self, blocks: IndexArray) -> None:
        """Adds a reference to blocks that the prefix cache knows, in whatever state they are."""
        if not len(blocks):
            return
        assert all_of(self.cache.holds[blocks]), "share of a block that is not in the cache"
        states = self._state[blocks]
        for state in (_RETIRED, _CACHED):
            self._counts[state] -= int(np.count_nonzero(states == state))
        self._state[blocks] = _HELD
        self._references[blocks] += 1

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
        left = self._references[blocks] - 1
        assert left.min() >= 0, f"double free among {blocks}"
        self._references[blocks] = left
        # Last block first: of a chain, the end must leave the cache before the beginning.
        unreferenced = (blocks[left == 0] if np.count_nonzero(left) else blocks)[::-1]
        if last_step <= answered_step:
            self._make_available(unreferenced)
        elif len(unreferenced):
            self._retired.append((last_step, self._mark(unreferenced, _RETIRED), unreferenced))

    def step_answered(self, step: int) -> None:
        """Makes the blocks available that waited for `step`."""
        while self._retired and self._retired[0][0] <= step:
            _, stamp, blocks = self._retired.popleft()
            due = self._still(_RETIRED, stamp, blocks)
            self._counts[_RETIRED] -= len(due)
            self._make_available(due)

    def distrust(self, blocks: IndexArray) -> None:
        """Takes blocks out of the prefix cache, because what was written to them is wrong."""
        self._forget(blocks)

    def _still(self, state: int, stamp: int, blocks: IndexArray) -> IndexArray:
        """Those of a queue's entry that were not taken up meanwhile."""
        stay = (self._stamp[blocks] == stamp) & (self._state[blocks] == state)
        return blocks if all_of(stay) else blocks[stay]

    def _make_available(self, blocks: IndexArray) -> None:
        known = self.cache.holds[blocks]
        num_known = int(np.count_nonzero(known))
        if num_known:
            kept = blocks if num_known == len(blocks) else blocks[known]
            self._cached.append((self._mark(kept, _CACHED), kept))
        if num_known < len(blocks):
            self._push_free(blocks[~known] if num_known else blocks)

    def _mark(self, blocks: IndexArray, state: int) -> int:
        stamp = self._next_stamp
        self._next_stamp += 1
        self._state[blocks] = state
        self._stamp[blocks] = stamp
        self._counts[state] += len(blocks)
        return stamp

    def _push_free(self, blocks: IndexArray) -> None:
        top = self._counts[_FREE]
        self._free[top : top + len(blocks)] = blocks
        self._state[blocks] = _FREE
        self._counts[_FREE] += len(blocks)

    def _evict(self, count: int) -> None:
        """Frees at least `count` cached blocks, least recently used first."""
        wanted = self._counts[_FREE] + count
        while (short := wanted - self._counts[_FREE]) > 0:
            stamp, blocks = self._cached.popleft()
            idle = self._still(_CACHED, stamp, blocks)
            # A few more than are short, in large pools, so that the next steps find some.
            short = max(short, self._eviction_batch)
            if len(idle) > short:
                self._cached.appendleft((stamp, idle[short:]))
                idle = idle[:short]
            self._forget(idle)

    def _forget(self, blocks: IndexArray) -> None:
        """Takes blocks out of the cache, with those that would not be found without them; idle ones become free."""
        gone = self.cache.forget(blocks)
        idle = self._state[gone] == _CACHED
        if not all_of(idle):
            gone = gone[idle]
        self._counts[_CACHED] -= len(gone)
        self._push_free(gone)

    def validate(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks conservation against the block tables that should hold all references."""
        references = np.zeros(self.num_blocks, np.int32)
        for table in tables:
            for block in table:
                references[block] += 1
        assert np.array_equal(references, self._references), "reference counts differ from the block tables"
        assert np.array_equal(references > 0, self._state == _HELD), "a block is loose and held, or neither"
        for state in (_FREE, _RETIRED, _CACHED):
            assert np.count_nonzero(self._state == state) == self._counts[state], f"miscounted blocks of state {state}"
        free = self._free[: self.num_free]
        assert sorted(free.tolist()) == np.flatnonzero(self._state == _FREE).tolist(), "a block is free twice or lost"
        assert self.cache.holds[self._state == _CACHED].all()
        assert not self.cache.holds[free].any()
        assert self.cache.holds[references > 1].all(), "a block is shared that is not in the cache"
        retired = sum(
            np.count_nonzero((self._state[b] == _RETIRED) & (self._stamp[b] == stamp)) for _, stamp, b in self._retired
        )
        cached = sum(
            np.count_nonzero((self._state[b] == _CACHED) & (self._stamp[b] == stamp)) for stamp, b in self._cached
        )
        assert (retired, cached) == (self.num_retired, self.num_cached), "a block waits in no queue"
        self.cache.validate()
