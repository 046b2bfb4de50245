"""Swapping: the KV of a preempted request is copied to the worker's host memory instead of being recomputed.

The scheduler decides for each victim. It swaps if the host pool has room and copying the blocks out and back is
expected to be faster than recomputing the tokens (`cost_model`).

Like device blocks, host blocks are reused only after the results of all steps that use them have arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.memory.block_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedKV:
    """A request's KV in host memory."""

    epoch: int
    """Epoch of the worker with the KV, which is unusable in other epochs."""
    host_blocks: IndexArray
    num_tokens: int
    """Number of leading tokens that it holds."""


class SwapSpace:
    """The host blocks of one worker."""

    def __init__(self, num_host_blocks: int) -> None:
        self.pool = BlockPool(num_host_blocks)
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self._next_id = 1

    def has_room(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` is above 0 and the host has as many free blocks."""
        return 0 < num_blocks <= self.pool.num_available

    def out(self, blocks: IndexArray) -> BlockCopy:
        """Take host blocks and return the copy of device blocks to them."""
        self.swapped_out_blocks += len(blocks)
        return self._copy(blocks, self.pool.take(len(blocks)))

    def back(self, host_blocks: IndexArray, blocks: IndexArray) -> BlockCopy:
        """Return the copy of host blocks back to the first of `blocks`."""
        self.swapped_in_blocks += len(host_blocks)
        return self._copy(host_blocks, blocks[: len(host_blocks)])

    def _copy(self, sources: IndexArray, targets: IndexArray) -> BlockCopy:
        copy = BlockCopy(copy_id=self._next_id, sources=sources.copy(), targets=targets.copy())
        self._next_id += 1
        return copy


def joined(copies: Sequence[BlockCopy]) -> tuple[IndexArray, IndexArray]:
    """Return all sources and all targets, as in the columns of a plan."""
    return (
        np.concatenate([NO_INDICES, *(copy.sources for copy in copies)]),
        np.concatenate([NO_INDICES, *(copy.targets for copy in copies)]),
    )
