"""Recurrent state of rows: tensors of a fixed size per row, which each token changes.

Mamba layers, linear attention and short convolutions keep such a state instead of keys and values. The state of a row
exists only at the row's newest computed token. A row therefore begins with its first token, and its steps follow each
other without gaps or repetitions. The scheduler guarantees this (`ModelInfo.state_bytes` in plan.proto), and this
module checks it: it remembers up to which token the state of each row is computed.

Checkpoints are copies of states. The scheduler decides when the state of a row is saved to a checkpoint, and which rows
begin with the state of a checkpoint instead of an empty one. The states of preempted requests are saved to host memory
in the same way, and checkpoints are copied there. The places in host memory are numbered after the checkpoints.

A step with drafts computes the states of all drafts in place. Therefore it first copies the states of its rows
(`back_up`). If a draft is rejected, `roll_back` restores the copy. The row's next step then begins with the accepted
tokens, whose states are *missing*, and has no drafts.

When a plan is made, it may not be known in which step such a row reaches a block boundary. The save of the state there
is then *due*, and drafts end at the boundary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from worker_svc.interface.arrays import IntArray


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


_UNKNOWN = -1
"""Length of a state that an unfinished forward pass may have changed."""


@dataclass(frozen=True, slots=True)
class OpenStates:
    """States of a forward pass's rows."""

    tensors: Sequence[torch.Tensor]
    """The states of all rows and checkpoints, each `[states, *shape]`."""
    places: torch.Tensor
    """`[rows] int64`: the places of the rows."""
    span: slice | None
    """The same places, if they follow each other."""


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Numbers of recurrent states that a worker allocates."""

    rows: int
    checkpoints: int = 0
    host_states: int = 0
    """States in host memory."""
    rolls_back: bool = False
    """Whether each row has a copy of its state for steps with drafts."""


class RowStates:
    """A worker's row states, its checkpoints, which follow the rows in each tensor, and the states in host memory."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        counts: StateCounts,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the states.

        Args:
            shapes: the tensors of one row's state.
            counts: the numbers of states.
            device: the device of the states, except for those in host memory.
            dtype: type of all tensors; None for the types in `shapes`.
        """
        num_on_device = counts.rows + counts.checkpoints
        self._tensors = [
            torch.zeros((num_on_device, *each.shape), dtype=dtype or each.dtype, device=device) for each in shapes
        ]
        self._host_tensors = [
            torch.zeros((counts.host_states, *each.shape[1:]), dtype=each.dtype) for each in self._tensors
        ]
        self._backups = [torch.zeros_like(each[: counts.rows]) for each in self._tensors] if counts.rolls_back else []
        self._backup_ends = [_UNKNOWN] * counts.rows
        self.missing: dict[int, list[int]] = {}
        """By row after a rejected draft: the tokens between its state and its next token."""
        self._due: dict[int, StateSave] = {}
        """By checkpoint: a save in a later step."""
        self._num_rows = counts.rows
        self._ends = [0] * (num_on_device + counts.host_states)

    def open(self, rows: Sequence[int], starts: Sequence[int]) -> "OpenStates":
        """Return some rows' states for a forward pass, which ends with `close`.

        Args:
            rows: the rows, ascending.
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
        for row in rows:
            self._ends[row] = _UNKNOWN
        consecutive = rows[-1] - rows[0] == len(rows) - 1
        return OpenStates(self._tensors, self._index(rows), slice(rows[0], rows[-1] + 1) if consecutive else None)

    def close(self, rows: Sequence[int], ends: Sequence[int], states: Sequence[torch.Tensor | None]) -> None:
        """Store the states of some rows after a forward pass.

        Args:
            rows: the rows.
            ends: number of tokens for which each row's state is computed.
            states: the tensors, each `[len(rows), *shape]`; None for one that was updated in place. A view from
                `open` is not copied.
        """
        index = self._index(rows)
        for tensor, state in zip(self._tensors, states, strict=True):
            if state is not None and state.data_ptr() != tensor[rows[0]].data_ptr():
                tensor.index_copy_(0, index, state.to(tensor.dtype))
        for row, end in zip(rows, ends, strict=True):
            self._ends[row] = end

    def back_up(self, row: int) -> None:
        """Copy the state of a row before a step with drafts."""
        for tensor, backup in zip(self._tensors, self._backups, strict=True):
            backup[row].copy_(tensor[row])
        self._backup_ends[row] = self._ends[row]

    def roll_back(self, row: int, tokens: list[int]) -> None:
        """Restore the state that a row had before a step with drafts, because some drafts were rejected.

        Args:
            row: the row.
            tokens: tokens of the step whose states are missing: the first one, and the accepted drafts.
        """
        for tensor, backup in zip(self._tensors, self._backups, strict=True):
            tensor[row].copy_(backup[row])
        self._ends[row] = self._backup_ends[row]
        self.missing[row] = tokens

    def leave(self, row: int) -> None:
        """Drop the missing tokens and the due saves of a row that leaves."""
        self.missing.pop(row, None)
        if self._due:
            self._due = {checkpoint: save for checkpoint, save in self._due.items() if save.row != row}

    def clear(self) -> None:
        """Drop the missing tokens and the due saves of all rows."""
        self.missing.clear()
        self._due.clear()

    def postpone(self, save: StateSave) -> None:
        """Save the state of a row when it has `save.length` tokens; replaces a due save to the same checkpoint."""
        self._due[save.checkpoint] = save

    def save_due(self, num_computed: IntArray) -> None:
        """Save the due states of the rows that have reached their length.

        Args:
            num_computed: `[max_rows]`, number of computed tokens of each row.

        Raises:
            RuntimeError: a row has passed its length.
        """
        for save in [each for each in self._due.values() if num_computed[each.row] >= each.length]:
            self.save(save)

    @property
    def draft_ends(self) -> dict[int, int]:
        """By row with due saves: the number of tokens that drafts must not exceed."""
        ends: dict[int, int] = {}
        for save in self._due.values():
            ends[save.row] = min(save.length, ends.get(save.row, save.length))
        return ends

    def save(self, save: StateSave) -> None:
        """Copy the state of a row to a checkpoint or to host memory.

        Raises:
            RuntimeError: the state is not that after `save.length` tokens.
        """
        self._due.pop(save.checkpoint, None)
        self._copy(save.row, self._num_rows + save.checkpoint, save.length)

    def keep(self, checkpoint: int, place: int) -> None:
        """Copy a checkpoint to a place in host memory."""
        source = self._num_rows + checkpoint
        self._copy(source, self._num_rows + place, self._ends[source])

    def forget(self, checkpoint: int) -> None:
        """Mark the state in a checkpoint or in host memory as invalid."""
        self._ends[self._num_rows + checkpoint] = _UNKNOWN

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
        for tensor, on_host in zip(self._tensors, self._host_tensors, strict=True):
            source_state, target_state = (
                tensor[place] if place < len(tensor) else on_host[place - len(tensor)] for place in (source, target)
            )
            target_state.copy_(source_state)
        self._ends[target] = length

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self._tensors[0].device)
