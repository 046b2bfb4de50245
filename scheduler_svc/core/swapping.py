"""Keeping a paused request's KV in the worker's host memory instead of computing it again.

The remedy is chosen per victim: *swap* when the host pool has room and copying its blocks out and in again is expected
to be cheaper than computing its tokens again, by the worker's own measurements of both; before anything was measured,
swap, so that there is something to measure. Host blocks are handed out like device blocks: again only when every step
that names them has been answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.block_pool import BlockPool

_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Blocks to copy between device and host in one plan; the direction is the plan's to say."""

    copy_id: int
    sources: IndexArray
    targets: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedKV:
    """A request's KV in host memory."""

    epoch: int
    """Of the worker that has it; worthless in any other."""
    host_blocks: IndexArray
    num_tokens: int
    """Leading tokens that it holds."""


class SwapSpace:
    """The host blocks of one worker, and what copying costs there."""

    def __init__(self, num_host_blocks: int) -> None:
        self.pool = BlockPool(num_host_blocks)
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self._next_id = 1
        self._block_s: float | None = None

    def copy_measured(self, num_blocks: int, seconds: float) -> None:
        """The worker copied so many blocks in so long."""
        per_block = seconds / num_blocks
        self._block_s = per_block if self._block_s is None else self._block_s + _SMOOTHING * (per_block - self._block_s)

    def is_cheaper(self, *, num_blocks: int, recompute_s: float) -> bool:
        """Whether swapping so many blocks out and in beats `recompute_s`, and there is room."""
        if not 0 < num_blocks <= self.pool.num_available:
            return False
        return self._block_s is None or 2 * num_blocks * self._block_s < recompute_s or recompute_s == 0.0

    def out(self, blocks: IndexArray) -> BlockCopy:
        """Copies device blocks to host blocks that are taken for them."""
        self.swapped_out_blocks += len(blocks)
        return self._copy(blocks, self.pool.take(len(blocks)))

    def back(self, host_blocks: IndexArray, blocks: IndexArray) -> BlockCopy:
        """Copies host blocks back to the first of `blocks`."""
        self.swapped_in_blocks += len(host_blocks)
        return self._copy(host_blocks, blocks[: len(host_blocks)])

    def _copy(self, sources: IndexArray, targets: IndexArray) -> BlockCopy:
        copy = BlockCopy(copy_id=self._next_id, sources=sources.copy(), targets=targets.copy())
        self._next_id += 1
        return copy


def joined(copies: Sequence[BlockCopy]) -> tuple[IndexArray, IndexArray]:
    """All sources and all targets, as a plan's columns have them."""
    return (
        np.concatenate([NO_INDICES, *(copy.sources for copy in copies)]),
        np.concatenate([NO_INDICES, *(copy.targets for copy in copies)]),
    )
