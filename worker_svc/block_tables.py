"""Block tables of one KV group: which blocks hold the tokens of each row, on the host and on the device.

The host's copy serves checks and slot computation, the device's is what attention follows: a part of the state that
follows the host by differences. Without such a device both are the same memory. Entries beyond a row's last block are
leftovers that nobody follows.
"""

import numpy as np
import torch

from shared.columns import Int32Array
from worker_svc.device_state import DeviceState, IntArray
from worker_svc.errors import PlanError

__all__ = ["BlockTables", "IntArray"]


class BlockTables:
    """The tables of all rows, filled from position 0 on."""

    def __init__(self, max_rows: int, max_blocks_per_row: int, num_blocks: int, state: DeviceState | None) -> None:
        self._num_blocks = num_blocks
        self._state = state
        self._host = np.zeros((max_rows, max_blocks_per_row), np.int32)
        self._on_device, self._first = (
            (torch.from_numpy(self._host), 0) if state is None else state.column(max_rows, max_blocks_per_row)
        )
        self._lengths = np.zeros(max_rows, np.int64)

    @property
    def device_tables(self) -> torch.Tensor:
        """`[max_rows, max_blocks_per_row] int32`, as of the state's last `publish`."""
        return self._on_device

    @property
    def lengths(self) -> IntArray:
        """`[max_rows]`: blocks of each row."""
        return self._lengths

    def blocks_at(self, rows: IntArray, index: IntArray) -> IntArray:
        """Block ids, elementwise, of the rows' blocks number `index`."""
        return self._host[rows, index].astype(np.int64)

    def replace(self, row: int, blocks: Int32Array) -> None:
        """Gives `row` a new table.

        Raises:
            PlanError: too many blocks, or a block that does not exist.
        """
        self._lengths[row] = 0
        self.append(np.full(len(blocks), row, np.int64), blocks)

    def append(self, rows: IntArray, blocks: Int32Array) -> None:
        """Appends block `blocks[i]` to the table of `rows[i]`; a row named more than once gets them in order.

        Raises:
            PlanError: too many blocks, or a block that does not exist.
        """
        if len(rows) == 0:
            return
        if int(blocks.min()) < 0 or int(blocks.max()) >= self._num_blocks:
            raise PlanError(f"a block id is outside [0, {self._num_blocks})")
        index = self._lengths[rows] + _occurrence(rows)
        if int(index.max()) >= self._host.shape[1]:
            raise PlanError(f"a row gets more than {self._host.shape[1]} blocks")
        self._host[rows, index] = blocks
        np.add.at(self._lengths, rows, 1)
        if self._state is not None:
            self._state.change(self._first + rows * self._host.shape[1] + index, blocks)

    def clear(self) -> None:
        """Forgets every table."""
        self._lengths.fill(0)


def _occurrence(values: IntArray) -> IntArray:
    """For each value how often it occurred before: [7, 9, 7, 7] → [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    run_lengths = np.diff(np.append(starts, len(values)))
    occurrence = np.empty(len(values), np.int64)
    occurrence[order] = np.arange(len(values)) - np.repeat(starts, run_lengths)
    return occurrence
