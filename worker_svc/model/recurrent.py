"""Recurrent state of rows: tensors of a fixed size per row, which each token changes.

Mamba layers, linear attention and short convolutions keep such a state instead of keys and values. The state of a row
exists only at the row's newest computed token. A row therefore begins with its first token, and its steps follow each
other without gaps or repetitions. The scheduler guarantees this (`ModelInfo.state_bytes` in plan.proto), and this
module checks it: it remembers up to which token the state of each row is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


class RowStates:
    """A worker's row states."""

    def __init__(
        self, shapes: Sequence[StateShape], num_rows: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """Allocate the states.

        Args:
            shapes: the tensors of one row's state.
            num_rows: number of rows.
            device: the device of the states.
            dtype: type of all tensors; None for the types in `shapes`.
        """
        self._tensors = [
            torch.zeros((num_rows, *each.shape), dtype=dtype or each.dtype, device=device) for each in shapes
        ]
        self._ends = [0] * num_rows

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

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self._tensors[0].device)
