"""Bugs that defeat a policy's purpose, or let a tenant's held backlog affect other tenants."""

from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import with_comparison
from scheduler_svc.core.planning.batch_selection import Admission
from scheduler_svc.core.queueing import policies
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.policies import LPM_WINDOW, LongestPrefixQueue
from scheduler_svc.core.requests.request import Request


@bug("order.purpose", aim=with_comparison)
def looks_count_as_passing(patch: pytest.MonkeyPatch) -> None:
    """Under `lpm`, requests count as passed over at every check, even if no request is admitted."""

    def counted(take: Any, self: LongestPrefixQueue, cached: Any) -> Any:
        for request in self.first_ones(LPM_WINDOW):
            request.wait.passed_over += 1
        return take(self, cached)

    wrap(patch, LongestPrefixQueue, "take", counted)


@bug("order.purpose", aim=with_comparison)
def short_part_by_arrival(patch: pytest.MonkeyPatch) -> None:
    """Under `lpm`, the part of a plan for short prompts admits the oldest request."""

    def without_cache(take: Any, self: Admission, rest: int | None) -> Any:
        known, self._cached_tokens = self._cached_tokens, None  # type: ignore[method-assign,assignment]
        try:
            return take(self, rest)
        finally:
            self._cached_tokens = known  # type: ignore[method-assign]

    wrap(patch, Admission, "_take_short", without_cache)


@bug("order.purpose", "order.policy", aim=with_comparison)
def hints_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Under `sjf`, all requests are expected to be equally long."""
    patch.setitem(policies._KEYS, "sjf", policies.fcfs_key)


@bug("tenant.backlog", "stream.reason", aim=with_comparison)
def held_requests_compete(patch: pytest.MonkeyPatch) -> None:
    """The waiting-time forecast counts requests that are held because of tenant limits."""
    patch.setattr(Backlog, "num_startable", property(lambda self: len(self)))


@bug("tenant.backlog", aim=with_comparison)
def held_requests_keep_the_floor(patch: pytest.MonkeyPatch) -> None:
    """Under `fair`, a tenant is backlogged while its requests are held for its limit."""

    def entered(hold: Any, self: Backlog, request: Request, now: float) -> None:
        hold(self, request, now)
        if self.policy.accounts_service:
            self.policy.enter(request.account)

    wrap(patch, Backlog, "_hold_for_tenant", entered)
