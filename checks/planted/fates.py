"""Bugs that affect requests after a worker's death, a drain, a restart of the core or a grammar failure."""

import dataclasses
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    CONTINUOUS,
    both,
    with_extras,
    with_faults,
    with_limits,
    with_much_memory,
    with_overload,
    with_traffic,
)
from checks.sim.faults import Fault
from checks.sim.scenario import Scenario
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.lifecycle.admission_control import AdmissionControl, TurnedAway
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers import quarantine
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.grammars import Grammars
from scheduler_svc.core.workers.worker import Worker

_ALL_TRACED = with_traffic(traced=1.0, embeds=0.0)
_CRASHES = both(_ALL_TRACED, with_limits(num_workers=1, **CONTINUOUS), with_faults(Fault.CRASH, per_step=0.2))


def _with_several(scenario: Scenario) -> Scenario:
    """Three workers, each with half the context of the previous one."""
    first = scenario.workers[0]
    context = min(first.max_model_len, first.num_blocks * first.block_size)
    sizes = [dataclasses.replace(first, max_model_len=max(2, context >> number)) for number in range(3)]
    return dataclasses.replace(scenario, workers=tuple(sizes))


_DRAINS = both(_ALL_TRACED, _with_several, with_faults(Fault.DRAIN, per_100_steps=5.0))
_LOSSES = both(
    _ALL_TRACED, with_limits(**CONTINUOUS), _with_several, with_faults(Fault.CRASH, Fault.IDLE_CRASH, per_step=0.05)
)


# ---------------------------------------------------------------- blame


@bug("stream.reason", "work.held", aim=_CRASHES)
def progress_proves_nothing(patch: pytest.MonkeyPatch) -> None:
    """A request stays a suspect even if it has generated tokens since its last fatal step."""
    patch.setattr(quarantine, "PROVEN_BY", 1 << 30)


@bug("stream.reason", "work.held", aim=both(_ALL_TRACED, with_faults(Fault.GOODBYE, per_step=0.2)))
def goodbye_is_fatal(patch: pytest.MonkeyPatch) -> None:
    """When a worker signs off, its requests become suspects."""

    def fatal(lose: Any, self: Scheduler, worker: Worker, reason: str, now: float, **_how: bool) -> None:
        lose(self, worker, reason, now, fatal=True)

    wrap(patch, Scheduler, "_lose", fatal)


@bug("stream.reason", "work.held", aim=both(_ALL_TRACED, with_faults(Fault.WRONG_STEP, per_step=0.2)))
def wrong_answer_is_fatal(patch: pytest.MonkeyPatch) -> None:
    """When a worker sends a wrong result, its requests become suspects."""

    def fatal(give_up: Any, self: Scheduler, worker: Worker, reason: str, now: float, **_how: bool) -> None:
        give_up(self, worker, reason, now, fatal=True)

    wrap(patch, Scheduler, "_give_up", fatal)
    patch.setattr(quarantine.Quarantine, "worker_survived", lambda self, worker_id: [])


@bug("stream.reason", "work.held", aim=both(_ALL_TRACED, with_faults(Fault.RESULT_AFTER_RECONNECT, per_step=0.2)))
def lost_session_is_fatal(patch: pytest.MonkeyPatch) -> None:
    """When a worker reconnects after a lost session, its requests become suspects."""

    def fatal(lose: Any, self: Scheduler, worker: Worker, reason: str, now: float, **_how: bool) -> None:
        lose(self, worker, reason, now, fatal=True)

    wrap(patch, Scheduler, "_lose", fatal)
    patch.setattr(quarantine.Quarantine, "worker_survived", lambda self, worker_id: [])


@bug(
    "stream.reason",
    "work.held",
    aim=both(_ALL_TRACED, with_limits(step_deadline_s=0.2), with_faults(Fault.FREEZE, per_step=0.2)),
)
def partition_condemns(patch: pytest.MonkeyPatch) -> None:
    """A fatal step is not withdrawn when the worker reconnects."""
    patch.setattr(quarantine.Quarantine, "worker_survived", lambda self, worker_id: [])


@bug("stream.reason", "work.held", aim=both(_CRASHES, with_traffic(credit_tokens=1)))
def all_rows_are_blamed(patch: pytest.MonkeyPatch) -> None:
    """All running requests become suspects, even those outside the fatal step."""

    def everybody(requests_in_flight: Any, self: Worker) -> list[Request]:
        rows = (self.rows.requests[row] for row in self.rows.occupied())
        return list(dict.fromkeys([*requests_in_flight(self), *(each for each in rows if each is not None)]))

    wrap(patch, Worker, "requests_in_flight", everybody)


@bug("poison", aim=both(_ALL_TRACED, with_faults(Fault.POISON, per_request=0.1)))
def nobody_is_blamed(patch: pytest.MonkeyPatch) -> None:
    """No fatal step is recorded for any request."""
    patch.setattr(Worker, "requests_in_flight", lambda self: [])


@bug("poison", aim=both(_ALL_TRACED, with_faults(Fault.POISON, per_request=0.1)))
def prompts_are_not_blamed(patch: pytest.MonkeyPatch) -> None:
    """Fatal steps are recorded only for decode rows, not for rows in prefill."""

    def decoding(requests_in_flight: Any, self: Worker) -> list[Request]:
        return [each for each in requests_in_flight(self) if each.num_generated]

    wrap(patch, Worker, "requests_in_flight", decoding)


@bug("poison", "stream.reason", aim=both(_ALL_TRACED, with_faults(Fault.POISON, per_request=0.1)))
def suspects_run_in_company(patch: pytest.MonkeyPatch) -> None:
    """Suspects never run alone, so the request that crashes workers is not found."""

    def unsuspected(record_fatal_step: Any, request: Request, *, alone: bool) -> bool:
        condemned: bool = record_fatal_step(request, alone=alone)
        request.faults.suspect = False
        return condemned

    original = quarantine.record_fatal_step
    patch.setattr(quarantine, "record_fatal_step", lambda request, alone: unsuspected(original, request, alone=alone))


@bug("stream.reason", aim=_CRASHES)
def condemned_in_company(patch: pytest.MonkeyPatch) -> None:
    """A request is refused because workers died in steps that also contained other requests."""
    original = quarantine.record_fatal_step

    def rejects(request: Any, *, alone: bool) -> bool:
        return original(request, alone=alone) or request.faults.fatal_steps >= quarantine.FATAL_STEPS

    patch.setattr(quarantine, "record_fatal_step", rejects)


# ---------------------------------------------------------------- drains


@bug("drain.moved", aim=_DRAINS)
def drain_moves_all(patch: pytest.MonkeyPatch) -> None:
    """A drain moves requests even if no other worker has room for them."""

    def move_all(requested: Any, self: Scheduler, event: Any, now: float) -> None:
        requested(self, event, now)
        worker = self._fleet.named(event.worker_id)
        if worker is not None and event.move:
            for row in worker.rows.occupied():
                self._requests.displace(worker.vacate(row), "moved", "moved away", now)

    wrap(patch, Scheduler, "_drain_requested", move_all)


@bug("drain.stayed", aim=_DRAINS)
def drain_moves_nothing(patch: pytest.MonkeyPatch) -> None:
    """A drain with `move` does not move any request."""

    def stay(requested: Any, self: Scheduler, event: Any, now: float) -> None:
        requested(self, dataclasses.replace(event, move=False), now)

    wrap(patch, Scheduler, "_drain_requested", stay)


@bug(
    "worker.draining",
    aim=both(
        _ALL_TRACED,
        _with_several,
        with_faults(Fault.DRAIN, Fault.RESULT_AFTER_RECONNECT, per_100_steps=5.0, per_step=0.1),
    ),
)
def drain_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A drained worker takes requests again after it has reconnected."""

    def forget(leave: Any, self: Fleet, worker: Worker, now: float) -> Any:
        left = leave(self, worker, now)
        self._drained.clear()
        return left

    wrap(patch, Fleet, "leave", forget)


# ---------------------------------------------------------------- restarts


@bug("stream.reason", aim=both(with_limits(max_queued_requests=4), with_faults(Fault.CORE_RESTART)))
def resubmitted_is_refused(patch: pytest.MonkeyPatch) -> None:
    """A request that an earlier core has accepted is refused because the queue is full."""

    def as_new(refusal: Any, self: AdmissionControl, request: Request, *state: Any, **more: Any) -> TurnedAway | None:
        accepted, request.accepted = request.accepted, False
        found: TurnedAway | None = refusal(self, request, *state, **more)
        request.accepted = accepted
        return found if found is None or found.reason is EndReason.QUEUE_FULL else None

    wrap(patch, AdmissionControl, "refusal", as_new)


# ---------------------------------------------------------------- grammars


@bug("grammar.wanted", "grammar.drop", "core", aim=with_extras)
def used_grammar_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A compiled grammar is dropped when its last row ends."""

    def forgotten(vacated: Any, self: Grammars, key: bytes) -> None:
        vacated(self, key)
        self._unused.pop(key, None)

    wrap(patch, Grammars, "vacated", forgotten)


@bug("stream.reason", aim=both(with_extras, _with_several))
def grammar_failed_by_one(patch: pytest.MonkeyPatch) -> None:
    """If one worker cannot compile a grammar, requests that other workers could serve end."""

    def of_any(self: Fleet, key: bytes, serves: Any) -> Any:
        failures = (worker.grammars.failure(key) for worker in self)
        return next((failure for failure in failures if failure is not None), None)

    patch.setattr(Fleet, "grammar_failure", of_any)


@bug("work.waiting", "finish", aim=both(with_extras, with_limits(num_workers=1, **CONTINUOUS)))
def held_for_grammar_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A request that waits for a grammar is not released when the grammar has been compiled."""
    patch.setattr(Backlog, "grammar_reported", lambda self, key, now: None)
    patch.setattr(Backlog, "prepare", lambda self, worker, num_free_rows, now: None)


# ---------------------------------------------------------------- waiting for one worker


@bug("finish", "work.waiting", aim=_LOSSES)
def assigned_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A request stays assigned to a worker whose plan did not admit it."""
    patch.setattr(Backlog, "recall", lambda self, worker, now: [])


@bug(
    "finish",
    "work.waiting",
    aim=both(
        with_much_memory,
        with_overload,
        with_limits(prefix_cache="hash", long_prefill_token_threshold=3, **CONTINUOUS),
        with_faults(Fault.GOODBYE, per_step=0.02),
    ),
)
def prefix_awaited_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A request that waits for its prefix is not released when the prefix has been computed."""
    patch.setattr(Backlog, "_prefix_advanced", lambda self, worker, key, now: None)
