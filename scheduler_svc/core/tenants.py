"""Limits per tenant: how many requests may wait and run at once, and how many tokens a second they may take.

The rate is a token bucket that holds ten seconds' worth. A request takes its prompt when it starts and its output when
it ends, so the bucket may go below zero; while it is, nothing of that tenant starts.
"""

from dataclasses import dataclass

from scheduler_svc.core.config import TenantLimits
from scheduler_svc.core.request import Request

BURST_S = 10.0
_UNLIMITED = TenantLimits()


@dataclass(slots=True)
class _Tenant:
    queued: int = 0
    running: int = 0
    tokens: float = 0.0
    refilled: float = 0.0


class Tenants:
    """What every tenant with live requests or an unfilled bucket has at the moment."""

    def __init__(self, limits: dict[str, TenantLimits]) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}

    def may_queue(self, request: Request) -> bool:
        """Whether one more request may wait."""
        if not self._limits:
            return True
        limits = self._limits_of(request)
        tenant = self._tenants.get(request.tenant)
        return not limits.max_queued or tenant is None or tenant.queued < limits.max_queued

    def may_run(self, request: Request, now: float) -> bool:
        """Whether the request may start."""
        if not self._limits:
            return True
        limits = self._limits_of(request)
        if limits is _UNLIMITED:
            return True
        tenant = self._of(request, now)
        if limits.max_running and tenant.running >= limits.max_running:
            return False
        return not limits.tokens_per_s or tenant.tokens >= 0

    def arrived(self, request: Request, now: float) -> None:
        """The request waits."""
        if self._limits:
            self._of(request, now).queued += 1

    def started(self, request: Request, now: float) -> None:
        """The request runs."""
        if self._limits:
            tenant = self._of(request, now)
            tenant.queued -= 1
            tenant.running += 1
            if request.attempts == 1:
                tenant.tokens -= request.num_prompt_tokens

    def paused(self, request: Request, now: float) -> None:
        """The request runs no more and waits again."""
        if self._limits:
            tenant = self._of(request, now)
            tenant.running -= 1
            tenant.queued += 1

    def ended(self, request: Request, now: float, *, was_running: bool) -> None:
        """The request is over."""
        if not self._limits:
            return
        tenant = self._of(request, now)
        tenant.tokens -= request.num_generated
        if was_running:
            tenant.running -= 1
        else:
            tenant.queued -= 1
        limits = self._limits_of(request)
        if not tenant.running and not tenant.queued and tenant.tokens >= BURST_S * limits.tokens_per_s:
            del self._tenants[request.tenant]

    def _of(self, request: Request, now: float) -> _Tenant:
        limits = self._limits_of(request)
        full = BURST_S * limits.tokens_per_s
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(tokens=full, refilled=now)
        tenant.tokens = min(full, tenant.tokens + limits.tokens_per_s * (now - tenant.refilled))
        tenant.refilled = now
        return tenant

    def _limits_of(self, request: Request) -> TenantLimits:
        return self._limits.get(request.tenant, self._limits.get("", _UNLIMITED))
