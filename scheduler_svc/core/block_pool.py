"""KV blocks of one worker: who holds which, and when one may be handed out again.

A block is in exactly one of four states:

* *free*;
* *held* by block tables, counted;
* *retired*: nobody holds it any more, but a plan in flight may still read or write it. It counts as held towards the
  outside. (Freeing too early is the classic bug of asynchronous scheduling.)
* *cached*: nobody holds it, no plan names it, but its KV is in the prefix cache. It is handed out when no free one is
  left, least recently used first.

Invariant: free + cached + retired + held == total.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.prefix_cache import PrefixCache


class BlockPool:
    """Blocks [0, num_blocks) with reference counts and deferred reuse."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        # A stack: the most recently used block is handed out first, it is the likeliest to be in a hardware cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = np.zeros(num_blocks, np.int32)
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        # (last step that may touch them, blocks), steps ascending. A block that is taken up again while it is retired
        # leaves its entry behind; `_retired_until` tells such entries from valid ones.
        self._retired: deque[tuple[int, list[int]]] = deque()
        self._retired_until: dict[int, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that the prefix cache knows."""
        return len(self._cached)

    @property
    def num_retired(self) -> int:
        """Blocks that become available once the steps in flight are answered."""
        return len(self._retired_until)

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor cached."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. The caller has checked `num_available`."""
        assert count <= self.num_available, f"take({count}) with {self.num_available} available"
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            self.cache.forget(block)
            self._free.append(block)
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        self._references[taken] = 1
        return taken

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached and held by nobody."""
        return block in self._cached

    def share(self, blocks: list[int]) -> None:
        """Adds a reference to blocks that the prefix cache knows, in whatever state they are."""
        for block in blocks:
            assert self.cache.holds(block), f"share of block {block}, which is not in the cache"
            if self._references[block] == 0:
                self._cached.pop(block, None)
                self._retired_until.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: list[int], *, last_step: int, answered_step: int) -> None:
        """Drops one reference of each block; those without any are retired until `last_step` is answered.

        Args:
            blocks: a block table or a part of one, in order of position; none twice.
            last_step: the last step that was sent to the worker.
            answered_step: the last step that was answered.
        """
        if not blocks:
            return
        self._references[blocks] -= 1
        left = self._references[blocks]
        assert left.min() >= 0, f"double free among {blocks}"
        # Last block first: of a chain, the end must leave the cache before the beginning.
        unreferenced = [block for block, count in zip(blocks, left.tolist(), strict=True) if count == 0][::-1]
        if last_step <= answered_step:
            self._make_available(unreferenced)
        elif unreferenced:
            self._retired.append((last_step, unreferenced))
            self._retired_until.update(dict.fromkeys(unreferenced, last_step))

    def step_answered(self, step: int) -> None:
        """Makes the blocks available that waited for `step`."""
        while self._retired and self._retired[0][0] <= step:
            until, blocks = self._retired.popleft()
            due = [block for block in blocks if self._retired_until.get(block) == until]
            for block in due:
                del self._retired_until[block]
            self._make_available(due)

    def distrust(self, blocks: list[int]) -> None:
        """Takes blocks out of the prefix cache, because what was written to them is wrong."""
        for block in blocks:
            self.cache.forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def _make_available(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.cache.holds(block):
                self._cached[block] = None
            else:
                self._free.append(block)

    def validate(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks conservation against the block tables that should hold all references."""
        references = np.zeros(self.num_blocks, np.int32)
        for table in tables:
            for block in table:
                references[block] += 1
        assert np.array_equal(references, self._references), "reference counts differ from the block tables"
        loose = [*self._free, *self._cached, *self._retired_until]
        assert len(set(loose)) == len(loose), "a block is loose twice"
        assert not references[loose].any(), "a loose block is in a block table"
        assert len(loose) + np.count_nonzero(references) == self.num_blocks, "a block is lost"
        assert all(self.cache.holds(block) for block in self._cached)
        assert not any(self.cache.holds(block) for block in self._free)
        shared = np.flatnonzero(references > 1).tolist()
        assert all(self.cache.holds(block) for block in shared), "a block is shared that is not in the cache"
        self.cache.validate()
