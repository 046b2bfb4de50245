"""Trials of suspects on one worker: which one runs alone, which ones are suspended, and when a suspect is cleared.

`quarantine` finds the suspects, and rejects those that have killed workers alone.
"""

from dataclasses import dataclass

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.quarantine import PROBATION, clear_suspect
from scheduler_svc.core.workers.rows import DECODE, RowTable


@dataclass(frozen=True, slots=True)
class Trial:
    """A suspect that runs alone, in a row of its own."""

    request: Request
    row: int
    generation: int


class Trials:
    """The trials of one worker in one epoch."""

    def __init__(self, rows: RowTable) -> None:
        """Start without trials; `rows` are the worker's rows."""
        self._rows = rows
        self.running: Trial | None = None
        """The trial whose suspect each step contains alone; read-only."""
        self.suspended: list[Trial] = []
        """Trials of suspects in the worker's rows that have no credit; read-only."""
        self.is_due = False
        """Whether a waiting suspect would fit. The next plan then contains it alone, once nothing is in flight."""

    def begin(self, request: Request, row: int) -> None:
        """Begin the trial of a suspect that was admitted to this row."""
        self.running = Trial(request, row, self._rows.generation.item(row))

    def judge(self, *, in_flight: bool) -> None:
        """End the trial of a suspect that has passed or left its row, and suspend one without credit.

        If no trial runs then, resume a suspended one that has credit again. A suspect with credit thus never runs with
        others.

        Args:
            in_flight: whether steps are in flight. The trial is then not suspended.
        """
        rows = self._rows
        self._end_if_decided()
        row = -1 if self.running is None or in_flight else self.running.row
        if row >= 0 and rows.state[row] == DECODE and rows.length[row] >= rows.allowed[row]:
            self._suspend()
        if self.running is None and self.suspended:
            self.suspended = [trial for trial in self.suspended if self._is_present(trial)]
            with_credit = (each for each in self.suspended if rows.length[each.row] < rows.allowed[each.row])
            self.running = next(with_credit, None)
            if self.running is not None:
                self.suspended.remove(self.running)
                self._end_if_decided()

    def end(self) -> None:
        """Clear the suspect whose trial runs, so that it runs with others again."""
        assert self.running is not None
        clear_suspect(self.running.request)
        self.running = None

    def _suspend(self) -> None:
        """Suspend the trial until the suspect has credit again, because a row without credit computes nothing."""
        assert self.running is not None
        self.suspended.append(self.running)
        self.running = None

    def _end_if_decided(self) -> None:
        """End the trial if its request has passed or left its row."""
        trial = self.running
        if trial is None:
            return
        if not self._is_present(trial):
            self.running = None
        elif self._rows.num_generated(trial.row) - trial.request.faults.fatal_at >= PROBATION:
            self.end()

    def _is_present(self, trial: Trial) -> bool:
        """Return whether the suspect still has its row."""
        rows, row = self._rows, trial.row
        return rows.requests[row] is trial.request and bool(rows.generation[row] == trial.generation)
