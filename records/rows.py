"""Tracks a worker's rows from its recorded plans, and returns the rows that compute in each step.

A plan contains only changes since the previous plan; this module applies them. Explanations, timelines and occupancy
use this module. What-if replays, which also simulate, hold the same state in arrays (`records.whatif.rows`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from records.values import AdmissionDigest, PlanDigest


@dataclass(slots=True, kw_only=True)
class Row:
    """A row in use. Users of this module derive classes that add attributes about the row's request."""

    number: int
    prefill_left: int
    """Number of known tokens that are not computed yet; 0 if the row decodes."""
    is_held: bool = False
    """Whether the row is held out of steps."""
    blocks: list[int] = field(default_factory=list)


RowT = TypeVar("RowT", bound=Row)


class StepRows(NamedTuple, Generic[RowT]):
    """Rows that compute in a step."""

    decodes: Sequence[RowT]
    """Rows that decode. If the rows did not change, this is the same object as in the previous step."""
    chunks: list[tuple[RowT, int]]
    """Rows that compute a prompt chunk, each with the chunk's number of tokens."""


class Rows(Generic[RowT]):
    """The rows in use of one worker."""

    def __init__(self) -> None:
        self._rows: dict[int, RowT] = {}
        self._decodes: list[RowT] | None = None

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows.values())

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def add(self, row: RowT) -> None:
        """Add a row that was in use when the recording began."""
        self._rows[row.number] = row

    def apply(
        self, plan: PlanDigest, admit: Callable[[AdmissionDigest], RowT], leave: Callable[[RowT], None] | None = None
    ) -> StepRows[RowT]:
        """Apply a plan.

        Args:
            plan: the plan that follows the one applied last.
            admit: creates the row for an admission.
            leave: called with each freed row, before another request gets it.
        """
        rows = self._rows
        for number in plan.leaves:
            self._leave(number, leave)
        for admission in plan.admissions:
            self._leave(admission.row, leave)
            rows[admission.row] = admit(admission)
        for number, block in zip(plan.append_rows, plan.append_blocks, strict=True):
            if number in rows:
                rows[number].blocks.append(block)
        for column, is_held in ((plan.holds, True), (plan.releases, False)):
            for number in column:
                if number in rows:
                    rows[number].is_held = is_held
        if plan.leaves or plan.admissions or plan.holds or plan.releases or self._decodes is None:
            self._decodes = [row for row in rows.values() if not row.prefill_left and not row.is_held]
        step = StepRows(self._decodes, [])
        for number, length in zip(plan.chunk_rows, plan.chunk_lengths, strict=True):
            if (row := rows.get(number)) is not None:
                step.chunks.append((row, length))
                row.prefill_left = max(0, row.prefill_left - length)
                if not row.prefill_left:
                    self._decodes = None
        return step

    def _leave(self, number: int, leave: Callable[[RowT], None] | None) -> None:
        row = self._rows.pop(number, None)
        if row is not None and leave is not None:
            leave(row)
