"""Block tables: each row's blocks in each KV group, on the host and on the device.

The host's copy is used for checks and slot mappings. The device's copy is used by attention, and is updated by changes
(`DeviceState`). On a CPU both are the same memory. Entries beyond a row's last block are stale and unused. A row has as
many blocks in each group.
"""

import numpy as np
import torch

from worker_svc.device.state import DeviceState
from worker_svc.interface.arrays import Int32Array, IntArray
from worker_svc.interface.errors import PlanError


class BlockTables:
    """Block tables of all rows and KV groups."""

    def __init__(self, num_groups: int, max_rows: int, max_blocks_per_row: int, state: DeviceState | None) -> None:
        self._state = state
        self._host = np.zeros((num_groups, max_rows, max_blocks_per_row), np.int32)
        self._first_group = self._host[0]
        on_device, self._first_word = (
            (torch.from_numpy(self._host), 0) if state is None else state.column(*self._host.shape)
        )
        # Created once, because views take time in each step.
        self._on_device, self._windows_on_device = on_device[0], on_device[1:]
        self._lengths = np.zeros(max_rows, np.int64)

    @property
    def device_tables(self) -> torch.Tensor:
        """Tables of the first group, `[max_rows, max_blocks_per_row] int32`, as of the last `DeviceState.publish`."""
        return self._on_device

    @property
    def device_window_tables(self) -> torch.Tensor:
        """The same for the other groups, `[num_groups - 1, max_rows, max_blocks_per_row] int32`."""
        return self._windows_on_device

    @property
    def lengths(self) -> IntArray:
        """`[max_rows]`: number of blocks of each row."""
        return self._lengths

    def blocks_at(self, rows: IntArray, index: IntArray) -> IntArray:
        """Return the block IDs `[n]` at positions `index` of the rows' tables in the first group, elementwise."""
        blocks: IntArray = self._first_group[rows, index].astype(np.int64)
        return blocks

    def window_blocks_at(self, rows: IntArray, index: IntArray) -> IntArray:
        """Return the same for the other groups, `[num_groups - 1, n]`, contiguous."""
        blocks: IntArray = self._host[1:, rows, index].astype(np.int64, order="C")
        return blocks

    def blocks(self, row: int) -> Int32Array:
        """Return a copy of the tables of `row`, `[num_groups, blocks]`."""
        return self._host[:, row, : int(self._lengths[row])].copy()

    def replace(self, row: int, blocks: Int32Array) -> None:
        """Replace the tables of `row` by `blocks` `[num_groups, blocks]`.

        Raises:
            PlanError: there are too many blocks.
        """
        count = blocks.shape[1]
        self.check_room(count)
        self._host[:, row, :count] = blocks
        self._lengths[row] = count
        self._change(np.full(count, row), np.arange(count), blocks)

    def next_positions(self, rows: IntArray) -> IntArray:
        """Return the positions at which `append` adds blocks for these rows; a row may appear more than once."""
        index: IntArray = self._lengths[rows]
        return index if bool((rows[1:] > rows[:-1]).all()) else index + _occurrence(rows)

    def append(self, rows: IntArray, blocks: Int32Array) -> None:
        """Append block `blocks[g, i]` to `rows[i]`'s table in each group g; a row may appear more than once.

        Raises:
            PlanError: there are too many blocks.
        """
        if len(rows) == 0:
            return
        index = self.next_positions(rows)
        ascending = bool((rows[1:] > rows[:-1]).all())
        self.check_room(int(index.max()) + 1)
        self._host[:, rows, index] = blocks
        if ascending:  # In the common case each row gets one block.
            self._lengths[rows] = index + 1
        else:
            np.add.at(self._lengths, rows, 1)
        self._change(rows, index, blocks)

    def check_room(self, num_blocks: int) -> None:
        """Check that a row may have so many blocks.

        Raises:
            PlanError: there are too many.
        """
        if num_blocks > self._host.shape[2]:
            raise PlanError(f"block table: a row exceeds {self._host.shape[2]} blocks")

    def clear(self) -> None:
        self._lengths.fill(0)

    def _change(self, rows: IntArray, index: IntArray, blocks: Int32Array) -> None:
        """Change the device's copy at positions `index` of the rows' tables to `blocks` `[num_groups, n]`."""
        if self._state is None:
            return
        num_groups, max_rows, width = self._host.shape
        tables = np.arange(num_groups)[:, None] * (max_rows * width)
        self._state.change((self._first_word + tables + rows * width + index).ravel(), blocks.ravel())


def _occurrence(values: IntArray) -> IntArray:
    """Return for each value how often it occurred before: [7, 9, 7, 7] → [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    run_lengths = np.diff(np.append(starts, len(values)))
    occurrence = np.empty(len(values), np.int64)
    occurrence[order] = np.arange(len(values)) - np.repeat(starts, run_lengths)
    return occurrence
