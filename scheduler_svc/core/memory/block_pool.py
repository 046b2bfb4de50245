"""Block pool: reference counts of one worker's KV blocks, and the decision when a block may be reused.

A block is in exactly one of four states:

* *free*;
* *held* by block tables, with a reference count;
* *retired*: no table contains the block any more, but a plan in flight may still read or write it. (Freeing too early
  is the classic bug in asynchronous scheduling.) The public count of held blocks includes retired blocks.
* *cached*: only the prefix cache refers to it. (A held block may be in the cache too.) When no free block is left, the
  least recently used cached block is reused. `keep_reserve` evicts the blocks that the next plan may need, at a time
  when no worker waits for a plan. Requests can retain cached blocks for a time (`retention`); these are reused last.

Invariant: free + cached + retired + held == total.

Prompts have hundreds of blocks, so every operation works on arrays of blocks. A block's state is one number, its
*claim*. Blocks retired together form one queue entry, whose number is their claim. If a block was reused since then,
its claim no longer matches the entry. Cached blocks are queued by last use (`recency`).
"""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Protocol

import numpy as np

from scheduler_svc.core.interface.arrays import BoolArray, IndexArray, all_of, any_of
from scheduler_svc.core.memory.host_keys import CachedBlock
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.recency import RecencyQueue
from scheduler_svc.core.memory.retention import Retention

_RESERVE_PART = 32
"""At most one block in this many is evicted before its memory is needed."""
CACHED, RETIRED = -1, -2
"""Results of `BlockPool.references` for cached and for retired blocks."""
_CACHED = CACHED
_FREE = 0
_RETIRED = 1 << 40
"""Boundary between the kinds of claims: smaller positive claims are reference counts; larger claims are numbers of
entries with retired blocks.
"""
_NONE = np.array(0)
_ONE = np.array(1)
"""Comparing with an array takes half the time of comparing with a number."""


class Content(Protocol):
    """The table of the blocks that contain KV which others may use."""

    holds: BoolArray
    """By block: whether the table has it."""

    def forget(self, blocks: IndexArray) -> IndexArray:
        """Remove blocks; return all blocks that left the table."""

    def validate(self) -> None:
        """Check that the table is consistent."""


class BlockPool:
    """Blocks [0, num_blocks) with reference counts and deferred reuse."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None, retention_share: float = 0.0) -> None:
        """Make a pool of free blocks.

        Args:
            num_blocks: number of blocks.
            cache: the prefix cache; by default one for full blocks only.
            retention_share: part of the blocks that requests can retain.
        """
        self.num_blocks = num_blocks
        self.cache = PrefixCache(num_blocks) if cache is None else cache
        self._content: Content = self.cache
        # Use a stack, so that the most recently used block is reused first: it is the most likely to be in a hardware
        # cache.
        self._free = np.arange(num_blocks, dtype=np.intp)
        self.num_free = num_blocks
        """Number of blocks without content."""
        self.num_cached = 0
        """Number of cached blocks that no table holds."""
        self.num_retired = 0
        """Number of blocks that become available once results for the steps in flight arrive."""
        self._claims = np.zeros(num_blocks, np.int64)
        self._last_entry = 0
        self._eviction_batch = num_blocks // 512
        self._retired: deque[tuple[int, int, IndexArray]] = deque()
        """(last step that may use the blocks, claim, blocks), ordered by step."""
        self._read_in: dict[int, int] = {}
        """By block in a table, the newest step without a result that copies from it, ordered by step."""
        self._cached = RecencyQueue(num_blocks)
        self.retention = Retention(num_blocks, retention_share)
        """The blocks that requests have asked to retain; read-only."""
        self._num_taken = 0
        """Number of blocks taken since the last call of `keep_reserve` or `num_taken`."""
        self.max_saved = 0
        """Maximum number of further blocks to note in `saved`; set before each plan."""
        self.saved: list[CachedBlock] = []
        """Cached blocks that were taken for the plan that is being made.

        The plan can still copy them before it writes them.
        """

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken now."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        """Number of blocks that are neither free nor cached."""
        return self.num_blocks - self.num_available

    def references(self, stride: int = 1) -> IndexArray:
        """Return for every `stride`-th block the number of tables that hold it, or `RETIRED` or `CACHED`."""
        claims = self._claims[::stride]
        found: IndexArray = np.where(claims >= _RETIRED, RETIRED, claims)
        return found

    def take(self, count: int) -> IndexArray:
        """Take `count` blocks, each with one reference; the caller has checked `num_available`."""
        if count > self.num_free:
            assert count <= self.num_available, f"take({count}) with {self.num_available} available"
            self._evict(count - self.num_free)
        top = self.num_free
        self.num_free = top - count
        taken = self._free[self.num_free : top].copy()
        self._claims[taken] = 1
        self._num_taken += count
        return taken

    def adopt(self, blocks: IndexArray) -> None:
        """Cache free blocks, whose content the prefix cache has just got."""
        if not len(blocks):
            return
        assert not self._claims[blocks].any(), "adopt of a block that is not free"
        free = self._free[: self.num_free]
        free = free[np.isin(free, blocks, invert=True)]
        self.num_free = len(free)
        self._free[: self.num_free] = free
        self._cache(blocks)

    def keep_reserve(self) -> None:
        """Evict cached blocks until as many are free as were taken since the last call, within a small limit."""
        reserve = min(self._num_taken, self.num_blocks // _RESERVE_PART, self.num_available)
        self._num_taken = 0
        if reserve > self.num_free:
            self._evict(reserve - self.num_free)

    def num_taken(self) -> int:
        """Return the number of blocks taken since the last call."""
        number, self._num_taken = self._num_taken, 0
        return number

    def oldest_cached(self, most: int) -> IndexArray:
        """Return some least recently used cached blocks, at least one and at most `most`; `num_cached` is above 0.

        They are a part of a chain, in order of position.
        """
        return self._cached.oldest(most)

    def retain(
        self,
        blocks: IndexArray,
        tenant: str,
        priority: int,
        until: float,
        session: Hashable | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Retain blocks in the cache, see `Retention.retain`."""
        self._set_levels(self.retention.retain(blocks, tenant, priority, until, session, whole=whole))

    def end_retention(self, now: float) -> None:
        """End the retention of blocks for which it is due."""
        ended = self.retention.ended(now)
        if len(ended):
            self._set_levels(ended)

    def end_sessions(self, sessions: Iterable[Hashable]) -> None:
        """End the retention by sessions."""
        ended = self.retention.end_sessions(sessions)
        if len(ended):
            self._set_levels(ended)

    def _set_levels(self, blocks: IndexArray) -> None:
        """Move cached blocks to the places in the queue that belong to their retention."""
        cached = blocks[self._claims[blocks] < _NONE]
        levels = self.retention.levels(cached)
        for level in np.unique(levels).tolist():
            self._cached.set_level(cached[levels == level], level)

    def evict(self, blocks: IndexArray) -> None:
        """Evict cached blocks that no table holds."""
        self._forget(blocks)

    def evict_after(self, blocks: IndexArray, *, last_step: int, answered_step: int) -> None:
        """Evict cached blocks that no table holds; they become free when the result of `last_step` arrives.

        This step copies them.
        """
        self.share(blocks)
        self._forget(blocks)
        self.release(blocks, last_step=last_step, answered_step=answered_step)

    def is_free(self, block: int) -> bool:
        """Return whether the block is not cached and in no block table."""
        return self._claims.item(block) == _FREE

    def is_idle(self, block: int) -> bool:
        """Return whether the block is cached, and neither a table nor a step without a result uses it."""
        return self._claims.item(block) == _CACHED

    def is_held(self, block: int) -> bool:
        """Return whether a table holds the block, or a step without a result uses it."""
        return self._claims.item(block) > 0

    def count_idle(self, blocks: IndexArray) -> int:
        """Return how many of the blocks are cached and held by no table."""
        return int(np.count_nonzero(self._claims[blocks] < 0)) if len(blocks) else 0

    def count_sole(self, blocks: IndexArray) -> int:
        """Return how many of the blocks have one reference. They become available when it is dropped."""
        return int(np.count_nonzero(self._claims[blocks] == _ONE))

    def share(self, blocks: IndexArray) -> None:
        """Add a reference to cached blocks in any state."""
        if not len(blocks):
            return
        assert all_of(self._content.holds[blocks]), "share of a block that is not in the cache"
        claims = self._claims[blocks]
        cached, retired = claims < _NONE, claims >= _RETIRED
        if any_of(cached):
            self._uncache(blocks[cached])
        self.num_retired -= int(np.count_nonzero(retired))
        claims[cached | retired] = 0
        self._claims[blocks] = claims + _ONE

    def read(self, blocks: IndexArray, *, last_step: int, answered_step: int) -> None:
        """Retain cached blocks until the result of `last_step`, which reads them, arrives."""
        self.share(blocks)
        self.release(blocks, last_step=last_step, answered_step=answered_step)
        for block in blocks[self._claims[blocks] < _RETIRED].tolist():
            # A row still holds the block. This plan may preempt that row, whose last step is then an earlier one.
            self._read_in.pop(block, None)
            self._read_in[block] = last_step

    def release(self, blocks: IndexArray, *, last_step: int, answered_step: int) -> None:
        """Drop one reference per block. Unreferenced blocks are retired until the result of `last_step` arrives.

        Args:
            blocks: a block table or a part of it, ordered by position; each block once.
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
        if self._read_in:
            read_in = np.array([self._read_in.get(block, 0) for block in blocks.tolist()], np.int64)
            later = read_in > last_step
            if any_of(later):
                self._retire(blocks[later], int(read_in.max()))
                blocks = blocks[~later]
        if last_step <= answered_step:
            self._make_available(blocks)
        else:
            self._retire(blocks, last_step)

    def _retire(self, blocks: IndexArray, last_step: int) -> None:
        if len(blocks):
            self._last_entry += 1
            claim = _RETIRED + self._last_entry
            self._claims[blocks] = claim
            self._retired.append((last_step, claim, blocks))
            self.num_retired += len(blocks)

    def step_answered(self, step: int) -> None:
        """Make the blocks that waited for `step` available."""
        while self._read_in and self._read_in[block := next(iter(self._read_in))] <= step:
            del self._read_in[block]
        while self._retired and self._retired[0][0] <= step:
            _, claim, blocks = self._retired.popleft()
            due = self._still(claim, blocks)
            self.num_retired -= len(due)
            self._make_available(due)

    def distrust(self, blocks: IndexArray) -> None:
        """Remove a block table, or a part of it, from the prefix cache, because its KV is wrong."""
        self._forget(blocks)

    def _still(self, claim: int, blocks: IndexArray) -> IndexArray:
        """Return the blocks in a retired entry that were not taken again since."""
        stay = self._claims[blocks] == np.array(claim)
        return blocks if all_of(stay) else blocks[stay]

    def _make_available(self, blocks: IndexArray) -> None:
        known = self._content.holds[blocks]
        num_known = known.tobytes().find(0)
        if num_known < 0:
            self._cache(blocks)
        elif any_of(known[num_known:]):
            self._cache(blocks[known])
            self._push_free(blocks[~known])
        else:
            # Usually only the last block is not cached, because it is not full.
            self._cache(blocks[:num_known])
            self._push_free(blocks[num_known:])

    def _cache(self, blocks: IndexArray) -> None:
        if len(blocks):
            self._claims[blocks] = _CACHED
            self._cached.append(blocks)
            self.num_cached += len(blocks)
            if self.retention:
                self._set_levels(blocks)

    def _uncache(self, blocks: IndexArray) -> None:
        if len(blocks):
            self._cached.remove(blocks)
            self.num_cached -= len(blocks)

    def _push_free(self, blocks: IndexArray) -> None:
        top = self.num_free
        self.num_free = top + len(blocks)
        self._free[top : self.num_free] = blocks
        self._claims[blocks] = _FREE

    def _evict(self, count: int) -> None:
        """Free at least `count` cached blocks, least recently used first."""
        wanted = self.num_free + count
        while (short := wanted - self.num_free) > 0:
            if self.max_saved:
                blocks = self._cached.oldest(min(short, self.max_saved))
                self.max_saved -= len(blocks)
                self.saved += self.cache.entries(blocks)
            else:
                # In large pools, evict a few blocks more, because blocks that were cached together are cheap to evict
                # together.
                blocks = self._cached.oldest(short + self._eviction_batch)
            self._forget(blocks)

    def _forget(self, blocks: IndexArray) -> None:
        """Evict blocks and all blocks that can only be found through them. Blocks without references become free."""
        gone = self._content.forget(blocks)
        self.retention.forget(gone)
        idle = self._claims[gone] < _NONE
        if not all_of(idle):
            gone = gone[idle]
        self._uncache(gone)
        self._push_free(gone)

    def validate(self, tables: Iterable[Iterable[int]], in_windows: Iterable[IndexArray] = ()) -> None:
        """Check the block counts against the block tables, which must account for all references.

        Args:
            tables: the block table of each row.
            in_windows: the window blocks of each row.
        """
        references = np.zeros(self.num_blocks, np.int64)
        for table in tables:
            for block in table:
                references[block] += 1
        is_shared = references > 1
        for blocks in in_windows:
            references[blocks] += 1
        claims = self._claims
        is_held = (claims > 0) & (claims < _RETIRED)
        assert np.array_equal(references, np.where(is_held, claims, 0)), "references differ from the block tables"
        free, retired, cached = claims == _FREE, claims >= _RETIRED, claims < 0
        counted = tuple(int(np.count_nonzero(state)) for state in (free, retired, cached))
        assert counted == (self.num_free, self.num_retired, self.num_cached), "miscounted blocks"
        stack = sorted(self._free[: self.num_free].tolist())
        assert stack == np.flatnonzero(free).tolist(), "a block is free twice or lost"
        assert self._content.holds[cached].all()
        assert not self._content.holds[free].any()
        assert self._content.holds[is_shared].all(), "a block is shared that is not in the cache"
        waiting = sum(int(np.count_nonzero(claims[blocks] == claim)) for _, claim, blocks in self._retired)
        assert waiting == self.num_retired, "a retired block waits for no step"
        assert sorted(self._cached.validate()) == np.flatnonzero(cached).tolist(), "a cached block is not queued"
        self.retention.validate()
        levels = self.retention.levels(np.arange(self.num_blocks))
        assert self._content.holds[levels > 0].all(), "a block is retained that is not in the cache"
        assert np.array_equal(self._cached.levels(np.flatnonzero(cached)), levels[cached]), "a level is not up to date"
        self._content.validate()
