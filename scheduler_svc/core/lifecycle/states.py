"""States of the live requests, and the transitions between them, as one table.

    ARRIVED ──► QUEUED ──ADMIT──► RUNNING ──LAST_STEP──► ENDING ──END──► FINISHED
                 │  ▲                │                     │
                 ▼  └─────QUEUE──────┴─────────────────────┘      every state ──END──► FINISHED
         STARVED, STRANDED

A running request returns to QUEUED when it is preempted, its row fails, or its worker is lost. A STARVED request
returns when its client grants credit, and a STRANDED request returns when a worker can serve it.

`TRANSITIONS` lists every valid transition. Any other transition is a bug and fails an assertion. No other module writes
the state of a request, or the fields that change only with the state.

A transition has two parts. First the request leaves its place by the action in the table. Then the method for the event
(`wait`, `strand`, `admit`, `last_step_planned`, `end`) puts the request into its new place:

* QUEUED: in the backlog;
* STARVED and STRANDED: outside the backlog, until the stream has credit or a worker can serve the request;
* RUNNING: in a row of a worker;
* ENDING: without a row, until the result of its last step arrives.

This module does not decide which event occurs; `registry` does. It reads no row and no end reason.
"""

import enum
from collections.abc import Callable, Mapping, ValuesView
from typing import ClassVar, NamedTuple

from scheduler_svc.core.interface.effects import AttemptEnded, Effect
from scheduler_svc.core.interface.plan import RowAdmission
from scheduler_svc.core.interface.records import (
    LOADED_TOKENS,
    NO_CHECKPOINT,
    NO_TAIL,
    RESTORED_TOKENS,
    NoteKind,
    WaitReason,
)
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request, RequestKey, RequestState, Wait
from scheduler_svc.core.workers.worker import Worker


class RequestEvent(enum.Enum):
    """Events that change the state of a request."""

    QUEUE = "it begins to wait, and its stream has credit"
    STARVE = "it begins to wait, and its stream has no credit"
    STRAND = "the planner removed it from the queue, because no worker of the fleet can serve it"
    ADMIT = "the planner took it from the queue and assigned a row"
    REFUSE = "it is refused on arrival or by the planner"
    LAST_STEP = "its last step was planned, and its row was released"
    END = "it ends for any other reason"

    # Each enum member is a single object, so compare identities. `Enum` hashes the member's name, which takes five
    # times as long.
    __hash__ = object.__hash__


WAITING = frozenset((RequestState.QUEUED, RequestState.STARVED, RequestState.STRANDED))
"""States of the requests that wait for a worker."""
_S, _E = RequestState, RequestEvent
_Leave = Callable[["RequestStates", Request, str], None]


class Transition(NamedTuple):
    """A row of the table."""

    to: RequestState
    leave: _Leave
    """Action that removes the request from its old place. Its docstring appears in docs/scheduling-proofs.md."""


class RequestStates:
    """Holds the live requests of a core by state, and appends its effects to `effects`."""

    def __init__(self, backlog: Backlog, tenants: Tenants, effects: list[Effect]) -> None:
        self._backlog = backlog
        self._tenants = tenants
        self._effects = effects
        self._running: dict[RequestKey, tuple[Worker, int]] = {}
        self._starved: dict[RequestKey, Request] = {}
        self._stranded: dict[RequestKey, Request] = {}
        self.queued_tokens = 0
        """Tokens of the waiting requests."""

    @property
    def num_waiting(self) -> int:
        """Number of requests without a worker, including starved and stranded ones."""
        return len(self._backlog) + len(self._starved) + len(self._stranded)

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """Number of requests without a worker, by waiting reason."""
        return {**self._backlog.by_reason, "credit": len(self._starved), "worker": len(self._stranded)}

    @property
    def stranded(self) -> ValuesView[Request]:
        """Requests that no worker of the fleet serves."""
        return self._stranded.values()

    def row_of(self, key: RequestKey) -> tuple[Worker, int] | None:
        """Return the worker and the row of a running request, or None."""
        return self._running.get(key)

    # ---------------------------------------------------------------- events

    def wait(self, request: Request, wait: Wait, outcome: str = "") -> None:
        """Move a request from any state to a waiting state.

        Args:
            request: a request that is not in a row, or has left it.
            wait: the new wait. It may be the one that a new request arrived with.
            outcome: why its attempt ended, if it had a worker.
        """
        num_tokens = len(request.tokens)
        has_credit = request.allowed > num_tokens
        had_worker = request.state is RequestState.RUNNING or request.state is RequestState.ENDING
        now = wait.since
        self._apply(request, RequestEvent.QUEUE if has_credit else RequestEvent.STARVE, outcome)
        if had_worker:
            request.preemptions += 1
            self._tenants.paused(request, now)
        self._count_tokens(request, num_tokens - request.wait.tokens)
        wait.tokens = num_tokens
        request.wait = wait
        if has_credit:
            self._backlog.push(request, now)
        else:
            self._starved[request.key] = request
            request.waits_for(WaitReason.CREDIT, now)
        self._backlog.tenant_changed(request.spec.tenant, now)

    def strand(self, request: Request, now: float) -> None:
        """Take a request that no worker can serve out of the queue until the fleet changes."""
        self._apply(request, RequestEvent.STRAND)
        self._stranded[request.key] = request
        request.stranded_since = now
        request.waits_for(WaitReason.NO_WORKER, now)

    def admit(self, request: Request, worker: Worker, admission: RowAdmission, now: float) -> None:
        """Record that a plan has given the request a row. `Tenants` has counted the request as running already."""
        self._apply(request, RequestEvent.ADMIT)
        self._running[request.key] = (worker, admission.row)
        self._count_tokens(request, -request.wait.tokens)
        request.wait.tokens = 0
        if request.first_planned is None:
            request.first_planned = now
        if not request.attempts:
            request.num_cached_prompt_tokens = min(admission.num_computed_tokens, request.spec.num_prompt_tokens)
        request.attempts += 1
        request.home = worker.epoch
        parts = [f"admitted to {worker.worker_id} row {admission.row}"]
        for count, what in (
            (admission.num_loaded_tokens, LOADED_TOKENS),
            (admission.num_restored_tokens, RESTORED_TOKENS),
            (admission.num_unusable_tokens, NO_TAIL if worker.checkpoints is None else NO_CHECKPOINT),
        ):
            if count:
                parts.append(f"{count} {what}")
        request.note(now, NoteKind.ADMITTED, ", ".join(parts))

    def last_step_planned(self, request: Request) -> None:
        """Record that the request has left its row and only waits for its last result."""
        self._apply(request, RequestEvent.LAST_STEP)

    def end(self, request: Request, event: RequestEvent, outcome: str, now: float) -> None:
        """End a request in any state; `event` is REFUSE or END."""
        had_worker = request.state is RequestState.RUNNING or request.state is RequestState.ENDING
        self._apply(request, event, outcome)
        self._count_tokens(request, -request.wait.tokens)
        self._tenants.ended(request, now, was_running=had_worker)
        self._backlog.tenant_changed(request.spec.tenant, now)

    def _count_tokens(self, request: Request, change: int) -> None:
        self.queued_tokens += change
        self._tenants.queue_tokens(request.spec.tenant, change)

    def _apply(self, request: Request, event: RequestEvent, outcome: str = "") -> None:
        """Write a request's new state, and remove the request from the container for its old state."""
        transition = self.TRANSITIONS.get((request.state, event))
        assert transition is not None, (
            f"request {request.spec.request_id}: {event.name} is not possible in {request.state.name}"
        )
        request.state = transition.to
        transition.leave(self, request, outcome)

    # ---------------------------------------------------------------- actions

    def _nothing(self, request: Request, outcome: str) -> None:
        """None."""

    def _leave_backlog(self, request: Request, outcome: str) -> None:
        """Remove a request from the backlog."""
        self._backlog.discard(request)

    def _leave_starved(self, request: Request, outcome: str) -> None:
        """Remove a request from the starved requests."""
        del self._starved[request.key]

    def _leave_stranded(self, request: Request, outcome: str) -> None:
        """Remove a request from the stranded requests."""
        del self._stranded[request.key]

    def _leave_worker(self, request: Request, outcome: str) -> None:
        """Drop its row and end its attempt."""
        del self._running[request.key]
        self._end_attempt(request, outcome)

    def _vacate_row(self, request: Request, outcome: str) -> None:
        """Vacate its row and end its attempt."""
        worker, row = self._running.pop(request.key)
        worker.vacate(row)
        self._end_attempt(request, outcome)

    def _forget_row(self, request: Request, outcome: str) -> None:
        """Drop its row."""
        del self._running[request.key]

    def _end_attempt(self, request: Request, outcome: str) -> None:
        """End its attempt."""
        if request.spec.traceparent:
            key = request.key
            self._effects.append(AttemptEnded(frontend=key.frontend, stream=key.stream, outcome=outcome))

    TRANSITIONS: ClassVar[Mapping[tuple[RequestState, RequestEvent], Transition]] = {
        (_S.ARRIVED, _E.QUEUE): Transition(_S.QUEUED, _nothing),
        (_S.ARRIVED, _E.STARVE): Transition(_S.STARVED, _nothing),
        (_S.ARRIVED, _E.REFUSE): Transition(_S.FINISHED, _nothing),
        (_S.ARRIVED, _E.END): Transition(_S.FINISHED, _nothing),
        (_S.QUEUED, _E.ADMIT): Transition(_S.RUNNING, _nothing),
        (_S.QUEUED, _E.STARVE): Transition(_S.STARVED, _nothing),
        (_S.QUEUED, _E.STRAND): Transition(_S.STRANDED, _nothing),
        (_S.QUEUED, _E.REFUSE): Transition(_S.FINISHED, _nothing),
        (_S.QUEUED, _E.END): Transition(_S.FINISHED, _leave_backlog),
        (_S.STARVED, _E.QUEUE): Transition(_S.QUEUED, _leave_starved),
        (_S.STARVED, _E.STARVE): Transition(_S.STARVED, _leave_starved),
        (_S.STARVED, _E.END): Transition(_S.FINISHED, _leave_starved),
        (_S.STRANDED, _E.QUEUE): Transition(_S.QUEUED, _leave_stranded),
        (_S.STRANDED, _E.STARVE): Transition(_S.STARVED, _leave_stranded),
        (_S.STRANDED, _E.END): Transition(_S.FINISHED, _leave_stranded),
        (_S.RUNNING, _E.LAST_STEP): Transition(_S.ENDING, _forget_row),
        (_S.RUNNING, _E.QUEUE): Transition(_S.QUEUED, _leave_worker),
        (_S.RUNNING, _E.STARVE): Transition(_S.STARVED, _leave_worker),
        (_S.RUNNING, _E.END): Transition(_S.FINISHED, _vacate_row),
        (_S.ENDING, _E.QUEUE): Transition(_S.QUEUED, _end_attempt),
        (_S.ENDING, _E.STARVE): Transition(_S.STARVED, _end_attempt),
        (_S.ENDING, _E.END): Transition(_S.FINISHED, _end_attempt),
    }
    """All valid transitions, by (state, event)."""

    # ----------------------------------------------------------------

    def validate(self, live: Mapping[RequestKey, Request]) -> None:
        """Check that every live request is in the container for its state, and in no other container."""
        places: dict[RequestState, list[RequestKey]] = {
            RequestState.QUEUED: [request.key for request in self._backlog],
            RequestState.STARVED: list(self._starved),
            RequestState.STRANDED: list(self._stranded),
            RequestState.RUNNING: list(self._running),
        }
        for state, keys in places.items():
            expected = sorted(key for key, request in live.items() if request.state is state)
            assert sorted(keys) == expected, f"{state.name}: a request is in two places, or in none"
        states = {request.state for request in live.values()}
        assert states.isdisjoint((RequestState.ARRIVED, RequestState.FINISHED)), "a live request has no place"
        for (worker, row), key in zip(self._running.values(), self._running, strict=True):
            assert worker.rows.requests[row] is live[key]
        waiting = [request for request in live.values() if request.state in WAITING]
        assert self.queued_tokens == sum(request.wait.tokens for request in waiting)
        self._tenants.validate(waiting)
