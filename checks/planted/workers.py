"""Bugs with workers: wrong results, lost and drained workers, and their requests."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import with_faults, with_long_freezes
from checks.sim.faults import Fault
from scheduler_svc.core import scheduler
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.worker import Worker


@bug("worker.stale", "core", aim=with_faults(Fault.STALE_EPOCH))
def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    """A result from an ended epoch is accepted as a result of the current epoch."""
    wrap(patch, Scheduler, "_known", lambda known, self, event: self._fleet.get(event.worker) or known(self, event))


@bug("worker.wrong", aim=with_faults(Fault.WRONG_ROWS))
def wrong_rows_believed(patch: pytest.MonkeyPatch) -> None:
    """A result with other rows than in the plan is accepted."""

    def believed(settle: Any, worker: Worker, event: ev.StepDone, now: float) -> Any:
        planned = worker.in_flight[0].rows if worker.in_flight else event.rows
        if len(planned) == len(event.rows):
            event = dataclasses.replace(event, rows=planned.astype(np.int32))
        return settle(worker, event, now)

    wrap(patch, scheduler, "settle", believed)


@bug("worker.blamed", aim=with_long_freezes)
def stall_blamed(patch: pytest.MonkeyPatch) -> None:
    """Workers are declared lost because the scheduler itself was stalled."""

    def no_excuse(time_passes: Any, self: Fleet, now: float) -> None:
        allowances = [(step, step.allowance) for each in self for step in each.in_flight]
        time_passes(self, now)
        for step, allowance in allowances:
            step.allowance = allowance

    wrap(patch, Fleet, "time_passes", no_excuse)


@bug("core", "finish", "empty", "work.running")
def worker_loss_forgets(patch: pytest.MonkeyPatch) -> None:
    """Requests of a lost worker whose last step was planned are dropped."""
    wrap(
        patch,
        Fleet,
        "leave",
        lambda leave, self, lost, now: [r for r in leave(self, lost, now) if r.state.name != "ENDING"],
    )


@bug("worker.draining", aim=with_faults(Fault.DRAIN))
def drained_gets_work(patch: pytest.MonkeyPatch) -> None:
    """A drained worker takes new requests."""

    def undrained(drain: Any, self: Scheduler, event: ev.DrainRequested, now: float) -> None:
        if event.move:
            drain(self, event, now)

    wrap(patch, Scheduler, "_drain_requested", undrained)
