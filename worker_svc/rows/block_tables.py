"""One KV group's block tables: each row's blocks, on the host and on the device.

The host's copy is used for checks and slot mappings. The device's copy is used by attention, and is updated by changes
(`DeviceState`). On a CPU both are the same memory. Entries beyond a row's last block are stale and unused.
"""

import numpy as np
import torch

from worker_svc.device.state import DeviceState
from worker_svc.interface.arrays import Int32Array, IntArray
from worker_svc.interface.errors import PlanError


class BlockTables:
    """Block tables of all rows."""

    def __init__(self, max_rows: int, max_blocks_per_row: int, state: DeviceState | None) -> None:
        self._state = state
        self._host = np.zeros((max_rows, max_blocks_per_row), np.int32)
        self._on_device, self._first = (
            (torch.from_numpy(self._host), 0) if state is None else state.column(max_rows, max_blocks_per_row)
        )
        self._lengths = np.zeros(max_rows, np.int64)

    @property
    def device_tables(self) -> torch.Tensor:
        """`[max_rows, max_blocks_per_row] int32`, as of the last `DeviceState.publish`."""
        return self._on_device

    @property
    def lengths(self) -> IntArray:
        """`[max_rows]`: number of blocks of each row."""
        return self._lengths

    def blocks_at(self, rows: IntArray, index: IntArray) -> IntArray:
        """Return the block IDs at positions `index` of the rows' tables, elementwise."""
        return self._host[rows, index].astype(np.int64)

    def blocks(self, row: int) -> Int32Array:
        """Return a copy of the table of `row`."""
        return self._host[row, : int(self._lengths[row])].copy()

    def replace(self, row: int, blocks: Int32Array) -> None:
        """Replace the table of `row`.

        Raises:
            PlanError: there are too many blocks.
        """
        self.check_room(len(blocks))
        self._host[row, : len(blocks)] = blocks
        self._lengths[row] = len(blocks)
        if self._state is not None:
            self._state.change(self._first + row * self._host.shape[1] + np.arange(len(blocks)), blocks)

    def next_positions(self, rows: IntArray) -> IntArray:
        """Return the positions at which `append` adds blocks for these rows; a row may appear more than once."""
        index: IntArray = self._lengths[rows]
        return index if bool((rows[1:] > rows[:-1]).all()) else index + _occurrence(rows)

    def append(self, rows: IntArray, blocks: Int32Array) -> None:
        """Append block `blocks[i]` to `rows[i]`'s table; a row may appear more than once.

        Raises:
            PlanError: there are too many blocks.
        """
        if len(rows) == 0:
            return
        index = self.next_positions(rows)
        ascending = bool((rows[1:] > rows[:-1]).all())
        self.check_room(int(index.max()) + 1)
        self._host[rows, index] = blocks
        if ascending:  # In the common case each row gets one block.
            self._lengths[rows] = index + 1
        else:
            np.add.at(self._lengths, rows, 1)
        if self._state is not None:
            self._state.change(self._first + rows * self._host.shape[1] + index, blocks)

    def check_room(self, num_blocks: int) -> None:
        """Check that a row may have so many blocks.

        Raises:
            PlanError: there are too many.
        """
        if num_blocks > self._host.shape[1]:
            raise PlanError(f"block table: a row exceeds {self._host.shape[1]} blocks")

    def clear(self) -> None:
        self._lengths.fill(0)


def _occurrence(values: IntArray) -> IntArray:
    """Return for each value how often it occurred before: [7, 9, 7, 7] → [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    run_lengths = np.diff(np.append(starts, len(values)))
    occurrence = np.empty(len(values), np.int64)
    occurrence[order] = np.arange(len(values)) - np.repeat(starts, run_lengths)
    return occurrence
