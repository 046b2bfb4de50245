"""KV blocks of one worker: who holds which, and when a freed one may be handed out again.

A block is *free*, *held* by block tables (counted), or *retired*: nobody holds it any more, but a plan in flight may
still read or write it. Retired blocks count as held towards the outside and become free when the last step sent before
they were released has been answered. (Freeing too early is the classic bug of asynchronous scheduling.)

Invariant: free + retired + held == total; a block is in exactly one of these states.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Blocks [0, num_blocks) with reference counts and deferred reuse."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the most recently used block is handed out first, it is the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = np.zeros(num_blocks, np.int32)
        # (last step that may touch them, blocks), steps ascending.
        self._retired: deque[tuple[int, list[int]]] = deque()
        self._num_retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def num_retired(self) -> int:
        """Blocks that become free once the steps in flight are answered."""
        return self._num_retired

    @property
    def num_held(self) -> int:
        """Blocks that are not free."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. The caller has checked `num_free`."""
        assert count <= len(self._free), f"take({count}) with {len(self._free)} free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        self._references[taken] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are held already."""
        for block in blocks:
            assert self._references[block] > 0, f"share of block {block}, which nobody holds"
            self._references[block] += 1

    def release(self, blocks: list[int], *, last_step: int, answered_step: int) -> None:
        """Drops one reference of each block; those without any are retired until `last_step` is answered.

        Args:
            blocks: the blocks; none twice.
            last_step: the last step that was sent to the worker.
            answered_step: the last step that was answered.
        """
        if not blocks:
            return
        self._references[blocks] -= 1
        assert self._references[blocks].min() >= 0, f"double free among {blocks}"
        unreferenced = [block for block in blocks if self._references[block] == 0]
        if last_step <= answered_step:
            self._free.extend(unreferenced)
        elif unreferenced:
            self._retired.append((last_step, unreferenced))
            self._num_retired += len(unreferenced)

    def step_answered(self, step: int) -> None:
        """Makes the blocks free that waited for `step`."""
        while self._retired and self._retired[0][0] <= step:
            _, blocks = self._retired.popleft()
            self._num_retired -= len(blocks)
            self._free.extend(blocks)

    def validate(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks conservation against the block tables that should hold all references."""
        references = np.zeros(self.num_blocks, np.int32)
        for table in tables:
            for block in table:
                references[block] += 1
        assert np.array_equal(references, self._references), "reference counts differ from the block tables"
        retired = [block for _, blocks in self._retired for block in blocks]
        loose = self._free + retired
        assert len(retired) == self._num_retired
        assert len(set(loose)) == len(loose), "a block is loose twice"
        assert not references[loose].any(), "a loose block is in a block table"
        assert len(loose) + np.count_nonzero(references) == self.num_blocks, "a block is lost"
