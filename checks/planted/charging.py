"""Bugs in accounting: tokens at repeated attempts and after a resumption, rates, quotas, queue limits."""

import dataclasses
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, with_limits
from scheduler_svc.core.lifecycle.admission_control import AdmissionControl
from scheduler_svc.core.lifecycle.states import RequestStates
from scheduler_svc.core.planning.planner import Planner
from scheduler_svc.core.queueing import tenants
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.rows import RowTable

_RATES = adaptation("token rates")
_ONE_EACH = adaptation("tenants that run one request")
_QUEUES = adaptation("tenants that queue two requests")
_SHORT_QUEUE = with_limits(max_queued_requests=20, tenant_limits={})


@bug("work.waiting", "finish", aim=_RATES)
def prompt_charged_again(patch: pytest.MonkeyPatch) -> None:
    """The prompt of an interrupted request is deducted from the bucket at every attempt."""

    def again(started: Any, self: Tenants, request: Request, output_tokens: float, now: float) -> None:
        if request.attempts:
            request.prompt_charged = False
        started(self, request, output_tokens, now)

    wrap(patch, Tenants, "started", again)


@bug("work.waiting", "finish", aim=_RATES)
def reservation_outlives_request(patch: pytest.MonkeyPatch) -> None:
    """The output that a request has reserved stays reserved after the request has ended."""

    def kept(ended: Any, self: Tenants, request: Request, now: float, **how: bool) -> None:
        request.reserved_output = None
        ended(self, request, now, **how)

    wrap(patch, Tenants, "ended", kept)


@bug("work.waiting", "finish", aim=_RATES)
def reserved_at_every_attempt(patch: pytest.MonkeyPatch) -> None:
    """A request reserves its output again at every attempt."""

    def again(started: Any, self: Tenants, request: Request, output_tokens: float, now: float) -> None:
        request.reserved_output = None
        started(self, request, output_tokens, now)

    wrap(patch, Tenants, "started", again)


@bug("limit.tenant_rate", "work.waiting", "finish", aim=_RATES)
def late_tokens_are_free(patch: pytest.MonkeyPatch) -> None:
    """Tokens are not charged if their requests have left their rows."""

    def of_rows(charge: Any, self: Scheduler, worker: Any, settled: Any, now: float) -> None:
        charge(self, worker, dataclasses.replace(settled, late=[]), now)

    wrap(patch, Scheduler, "_charge", of_rows)


@bug("work.waiting", "finish", aim=_RATES)
def late_tokens_charged_twice(patch: pytest.MonkeyPatch) -> None:
    """Tokens are charged twice if their requests have left their rows."""

    def twice(charge: Any, self: Scheduler, worker: Any, settled: Any, now: float) -> None:
        charge(self, worker, dataclasses.replace(settled, late=settled.late * 2), now)

    wrap(patch, Scheduler, "_charge", twice)


@bug("work.waiting", "finish", aim=adaptation("drafts"))
def accepted_drafts_are_free(patch: pytest.MonkeyPatch) -> None:
    """A row is charged one token per step, even if it gets several."""
    wrap(patch, RowTable, "charge", lambda charge, self, rows, counts: charge(self, rows, None))


@bug("work.waiting", "finish", aim=_RATES)
def started_waits_for_the_rate(patch: pytest.MonkeyPatch) -> None:
    """An interrupted request waits until its tenant's bucket is refilled."""

    def strict(may_run: Any, self: Tenants, request: Request, now: float) -> bool:
        rate = self._limits and self._limits_of(request.spec.tenant).tokens_per_s
        may: bool = may_run(self, request, now)
        return may and not (rate and self._of(request.spec.tenant, now).spare < 0)

    wrap(patch, Tenants, "may_run", strict)


@bug("limit.tenant_rate", aim=_RATES)
def bucket_holds_a_minute(patch: pytest.MonkeyPatch) -> None:
    """A tenant's bucket holds one minute's tokens instead of ten seconds'."""
    patch.setattr(tenants, "BURST_S", 60.0)


@bug("work.waiting", "finish", aim=_RATES)
def resumed_prompt_charged(patch: pytest.MonkeyPatch) -> None:
    """The prompt of a resumed request is deducted from the bucket a second time."""

    def unpaid(arrived: Any, self: Tenants, request: Request, now: float) -> None:
        request.prompt_charged = False
        arrived(self, request, now)

    wrap(patch, Tenants, "arrived", unpaid)


@bug("work.waiting", "finish", aim=_RATES)
def refill_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a bucket to refill are checked only after another event for their tenant."""
    patch.setattr(Tenants, "refilled_at", lambda self, name, now: None)


@bug("work.waiting", "finish", "core", aim=_ONE_EACH)
def preempted_still_runs(patch: pytest.MonkeyPatch) -> None:
    """An interrupted request still counts as running for its tenant."""

    def counted(paused: Any, self: Tenants, request: Request, now: float) -> None:
        paused(self, request, now)
        if self._limits:
            self._of(request.spec.tenant, now).running += 1

    wrap(patch, Tenants, "paused", counted)


@bug("limit.tenant", aim=_ONE_EACH)
def preempted_frees_twice(patch: pytest.MonkeyPatch) -> None:
    """An interrupted request frees two of the requests that its tenant may run."""

    def twice(paused: Any, self: Tenants, request: Request, now: float) -> None:
        paused(self, request, now)
        if self._limits:
            self._of(request.spec.tenant, now).running -= 1

    wrap(patch, Tenants, "paused", twice)


@bug("stream.reason", "limit.queue", aim=_QUEUES)
def running_count_as_queued(patch: pytest.MonkeyPatch) -> None:
    """Running requests of a tenant count against max_queued."""

    def all_of_it(may_queue: Any, self: Tenants, request: Request) -> bool:
        tenant = self._tenants.get(request.spec.tenant) if self._limits else None
        most = self._limits_of(request.spec.tenant).max_queued if self._limits else 0
        return bool(may_queue(self, request)) and not (tenant and most and tenant.queued + tenant.running >= most)

    wrap(patch, Tenants, "may_queue", all_of_it)


@bug("limit.queue", aim=with_limits(max_queued_tokens=100))
def tokens_queue_without_limit(patch: pytest.MonkeyPatch) -> None:
    """The tokens of waiting requests have no limit."""

    def by_number(_full: Any, self: AdmissionControl, request: Request, num_waiting: int, num_tokens: int) -> bool:
        return num_waiting >= self._config.max_queued_requests

    wrap(patch, AdmissionControl, "_queue_is_full", by_number)


@bug("limit.queue", aim=_SHORT_QUEUE)
def one_tenant_fills_the_queue(patch: pytest.MonkeyPatch) -> None:
    """A single tenant may use the whole queue."""
    patch.setattr(AdmissionControl, "_exceeds_its_share", lambda *_: False)


@bug("limit.queue", "stream.reason", "core", aim=_SHORT_QUEUE)
def share_of_what_waited_once(patch: pytest.MonkeyPatch) -> None:
    """Requests that have started still count against their tenant's share of the queue."""

    def kept(started: Any, self: Tenants, request: Request, *how: Any) -> None:
        started(self, request, *how)
        self._tenants[request.spec.tenant].queued += 1

    wrap(patch, Tenants, "started", kept)


@bug("core", "stream.reason", aim=with_limits(max_queued_tokens=100))
def preempted_tokens_not_queued(patch: pytest.MonkeyPatch) -> None:
    """The tokens that an interrupted request has generated stay in the queue's count after its next admission."""

    def grown(admit: Any, self: RequestStates, request: Request, *how: Any) -> None:
        before = request.wait.tokens
        request.wait.tokens = min(before, request.spec.num_prompt_tokens)
        admit(self, request, *how)

    wrap(patch, RequestStates, "admit", grown)


@bug(unseen="the bound of `fair` is larger than what the prompts of a few attempts add")
def prompt_served_at_every_attempt(patch: pytest.MonkeyPatch) -> None:
    """Under `fair`, an interrupted request's prompt counts as service at every attempt."""

    def every_time(place: Any, self: Planner, request: Request, room: Any) -> Any:
        if request.spec.tenant == "a" and self._policy.accounts_service and request.attempts:
            self._policy.served(request.account, prompt_tokens=request.spec.num_prompt_tokens)
        return place(self, request, room)

    wrap(patch, Planner, "_place", every_time)
