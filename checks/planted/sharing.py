"""Bugs in sharing among tenants: service under `fair`, quotas, the order of a policy."""

import dataclasses
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    CONTINUOUS,
    both,
    with_faults,
    with_limits,
    with_much_memory,
    with_overload,
    with_traffic,
)
from checks.sim.faults import Fault
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.queueing import policies
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.policies import FairPolicy, LongestPrefixQueue
from scheduler_svc.core.queueing.service_ledger import ServiceLedger
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request

_FAIR = both(with_much_memory, with_limits(policy="fair", classes={}, tenant_weights={"b": 2.0}, **CONTINUOUS))
_ONE_TENANT = "a"


def _with_quota(**limits: Any) -> Any:
    """One worker with a large memory, and these limits for every tenant."""
    each = {"": TenantLimits(**limits)}
    return both(with_much_memory, with_limits(**CONTINUOUS | {"tenant_limits": each}))


# ---------------------------------------------------------------- service


@bug("fair.bound", aim=both(_FAIR, with_overload))
def service_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The service of one tenant is not counted."""

    def others(served: Any, self: FairPolicy, account: Any, **tokens: int) -> None:
        if account.tenant != _ONE_TENANT:
            served(self, account, **tokens)

    wrap(patch, FairPolicy, "served", others)


@bug("fair.bound", aim=_FAIR)
def service_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """The service of one tenant is counted twice."""

    def twice(served: Any, self: FairPolicy, account: Any, **tokens: int) -> None:
        for _ in range(1 + (account.tenant == _ONE_TENANT)):
            served(self, account, **tokens)

    wrap(patch, FairPolicy, "served", twice)


@bug("fair.bound", aim=_FAIR)
def service_of_another_tenant(patch: pytest.MonkeyPatch) -> None:
    """The service of one tenant is counted for another tenant."""

    def to_another(served: Any, self: FairPolicy, account: Any, **tokens: int) -> None:
        if account.tenant == _ONE_TENANT:
            account = account._replace(tenant="c")
        served(self, account, **tokens)

    wrap(patch, FairPolicy, "served", to_another)


@bug("fair.bound", aim=_FAIR)
def most_served_first(patch: pytest.MonkeyPatch) -> None:
    """The tenant with the most service is next."""
    wrap(patch, ServiceLedger, "service", lambda service, self, group: -service(self, group))


@bug("fair.bound", aim=both(_FAIR, with_limits(tenant_weights={"a": 8.0, "b": 8.0})))
def weights_ignored(patch: pytest.MonkeyPatch) -> None:
    """All tenants have the same share."""

    def without(init: Any, self: ServiceLedger, _weights: Any) -> None:
        init(self, {})

    wrap(patch, ServiceLedger, "__init__", without)


# ---------------------------------------------------------------- quotas


@bug("limit.tenant", aim=_with_quota(max_running=1))
def tenant_runs_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """A tenant runs one request more than max_running."""

    def more(limits_of: Any, self: Tenants, name: str) -> TenantLimits:
        limits: TenantLimits = limits_of(self, name)
        return dataclasses.replace(limits, max_running=limits.max_running + 1) if limits.max_running else limits

    wrap(patch, Tenants, "_limits_of", more)


@bug("limit.queue", "stream.reason", aim=_with_quota(max_queued=2))
def tenant_queue_one_too_long(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_queued of a tenant waits."""

    def more(limits_of: Any, self: Tenants, name: str) -> TenantLimits:
        limits: TenantLimits = limits_of(self, name)
        return dataclasses.replace(limits, max_queued=limits.max_queued + 1) if limits.max_queued else limits

    wrap(patch, Tenants, "_limits_of", more)


@bug("work.waiting", "finish", aim=_with_quota(max_running=1))
def held_for_quota_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A request that is held for its tenant's quota is not released when the tenant may run more."""
    patch.setattr(Backlog, "tenant_changed", lambda self, tenant, now: None)


@bug("work.effort", aim=both(_with_quota(max_running=1), with_overload))
def held_for_quota_looked_at(patch: pytest.MonkeyPatch) -> None:
    """Requests of tenants at their limit stay in the queue, and every plan examines them."""

    def stay(self: Backlog, request: Request, now: float) -> None:
        self._enter(request)

    patch.setattr(Backlog, "_hold_for_tenant", stay)


@bug("work.waiting", "finish", aim=_with_quota(tokens_per_s=20.0))
def bucket_not_refilled(patch: pytest.MonkeyPatch) -> None:
    """A tenant's token bucket is not refilled over time."""
    patch.setattr(Tenants, "_refill", lambda self, tenant, limits, now: None)


@bug("work.waiting", "finish", aim=_with_quota(tokens_per_s=20.0))
def prompt_charged_twice(patch: pytest.MonkeyPatch) -> None:
    """The prompt of a request is deducted from the bucket twice."""

    def twice(started: Any, self: Tenants, request: Request, output_tokens: float, now: float) -> None:
        if not request.prompt_charged:
            self._of(request.spec.tenant, now).tokens -= request.spec.num_prompt_tokens
        started(self, request, output_tokens, now)

    wrap(patch, Tenants, "started", twice)


@bug("limit.tenant_rate", aim=_with_quota(tokens_per_s=20.0))
def output_not_charged(patch: pytest.MonkeyPatch) -> None:
    """The output of a request is not deducted from the bucket."""

    def free(charged: Any, self: Tenants, name: str, num_tokens: int, now: float) -> None:
        self._of(name, now).tokens += num_tokens
        charged(self, name, num_tokens, now)

    wrap(patch, Tenants, "charged", free)


# ---------------------------------------------------------------- order


@bug(
    "order.target",
    aim=both(
        with_much_memory,
        with_limits(policy="edf", **CONTINUOUS),
        with_traffic(deadlines=0.4, longest_prompt=3, families=0),
    ),
)
def first_token_target_ignored(patch: pytest.MonkeyPatch) -> None:
    """Under `edf`, the target for the first token is ignored."""

    def without(latest_start: Any, self: Forecast, request: Request, uncached: int) -> float | None:
        wanted, request.ttft_deadline = request.ttft_deadline, None
        start: float | None = latest_start(self, request, uncached)
        request.ttft_deadline = wanted
        return start

    wrap(patch, Forecast, "latest_start", without)


@bug(
    "order.policy",
    aim=both(with_much_memory, with_limits(policy="sjf", **CONTINUOUS), with_faults(Fault.GOODBYE, per_step=0.05)),
)
def generated_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Under `sjf`, tokens that were already generated still count as expected."""

    def whole(request: Request) -> float:
        return request.arrival + policies.SJF_S_PER_TOKEN * request.wait.forecast_tokens

    patch.setitem(policies._KEYS, "sjf", whole)


@bug(
    "order.passed",
    aim=both(with_much_memory, with_overload, with_limits(policy="lpm", classes={}, prefix_cache="hash", **CONTINUOUS)),
)
def passed_over_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Under `lpm`, requests with a cached prefix overtake a request without one without limit."""
    patch.setattr(LongestPrefixQueue, "MAX_PASSED", 1 << 30)
