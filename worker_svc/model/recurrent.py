"""Recurrent state of rows: tensors of a fixed size per row, which each token changes.

Mamba layers, linear attention and short convolutions keep such a state instead of keys and values. The state of a row
exists only at the row's newest computed token. A row therefore begins with its first token, and its steps follow each
other without gaps or repetitions. The scheduler guarantees this (`ModelInfo.state_bytes` in plan.proto), and this
module checks it: it remembers up to which token the state of each row is computed.

Checkpoints are copies of states. The scheduler decides when the state of a row is saved to a checkpoint, and which rows
begin with the state of a checkpoint instead of an empty one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a row's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor for one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateSave(NamedTuple):
    """A state to save to a checkpoint."""

    row: int
    length: int
    """Number of the row's tokens after which its state is saved."""
    checkpoint: int


class RowStates:
    """A worker's row states, and its checkpoints, which follow the rows in each tensor."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_rows: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        num_checkpoints: int = 0,
    ) -> None:
        """Allocate the states.

        Args:
            shapes: the tensors of one row's state.
            num_rows: number of rows.
            num_checkpoints: number of checkpoints.
            device: the device of the states.
            dtype: type of all tensors; None for the types in `shapes`.
        """
        self._tensors = [
            torch.zeros((num_rows + num_checkpoints, *each.shape), dtype=dtype or each.dtype, device=device)
            for each in shapes
        ]
        self._num_rows = num_rows
        self._ends = [0] * (num_rows + num_checkpoints)

    def read(self, rows: Sequence[int], starts: Sequence[int]) -> list[torch.Tensor]:
        """Return copies of some rows' states, each `[len(rows), *shape]`.

        Args:
            rows: the rows.
            starts: the next token of each row.

        Raises:
            RuntimeError: a state is not that of the tokens before the next one.
        """
        for row, start in zip(rows, starts, strict=True):
            if self._ends[row] != start:
                raise RuntimeError(
                    f"recurrent state: that of row {row} is computed for {self._ends[row]} tokens, but the step"
                    f" begins at token {start}"
                )
        index = self._index(rows)
        return [tensor.index_select(0, index) for tensor in self._tensors]

    def write(self, rows: Sequence[int], ends: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Store the states of some rows.

        Args:
            rows: the rows.
            ends: number of tokens for which each row's state is computed.
            states: the tensors, each `[len(rows), *shape]`.
        """
        index = self._index(rows)
        for tensor, state in zip(self._tensors, states, strict=True):
            tensor.index_copy_(0, index, state.to(tensor.dtype))
        for row, end in zip(rows, ends, strict=True):
            self._ends[row] = end

    def save(self, save: StateSave) -> None:
        """Copy the state of a row to a checkpoint.

        Raises:
            RuntimeError: the state is not that after `save.length` tokens.
        """
        self._copy(save.row, self._num_rows + save.checkpoint, save.length)

    def restore(self, row: int, length: int, checkpoint: int) -> None:
        """Copy a checkpoint to the state of a row, which begins with `length` computed tokens.

        Raises:
            RuntimeError: the checkpoint is not the state after `length` tokens.
        """
        self._copy(self._num_rows + checkpoint, row, length)

    def _copy(self, source: int, target: int, length: int) -> None:
        if self._ends[source] != length:
            raise RuntimeError(
                f"recurrent state: place {source} has the state after {self._ends[source]} tokens, but the plan copies"
                f" the state after {length}"
            )
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
        self._ends[target] = length

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self._tensors[0].device)
