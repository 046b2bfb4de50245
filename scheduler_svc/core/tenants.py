"""Limits per tenant: how many requests may wait and run at once, and how many tokens a second they may take.

The rate is a token bucket that holds ten seconds' worth. A request takes its prompt when it starts and its output when
it ends, so the bucket may go below zero; while it is, nothing of that tenant starts.
"""

from dataclasses import dataclass

from scheduler_svc.core.config import TenantLimits
from scheduler_svc.core.request import Request

BURST_S = 10.0
_UNLIMITED = TenantLimits()
_FEW = 64
"""So many tenants are not looked through for those that can be forgotten."""


@dataclass(slots=True)
class _Tenant:
    queued: int = 0
    running: int = 0
    tokens: float = 0.0
    refilled: float = 0.0


class Tenants:
    """What every tenant with live requests or an unfilled bucket has at the moment.

    A tenant without either is as good as a new one. Such are forgotten whenever the table has doubled, for clients may
    choose their tenants' names.
    """

    def __init__(self, limits: dict[str, TenantLimits]) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self._many = _FEW

    def __len__(self) -> int:
        return len(self._tenants)

    def may_queue(self, request: Request) -> bool:
        """Whether one more request may wait."""
        if not self._limits:
            return True
        limits = self._limits_of(request.tenant)
        tenant = self._tenants.get(request.tenant)
        return not limits.max_queued or tenant is None or tenant.queued < limits.max_queued

    def may_run(self, request: Request, now: float) -> bool:
        """Whether the request may start."""
        if not self._limits:
            return True
        limits = self._limits_of(request.tenant)
        if limits is _UNLIMITED:
            return True
        tenant = self._of(request.tenant, now)
        if limits.max_running and tenant.running >= limits.max_running:
            return False
        return not limits.tokens_per_s or tenant.tokens >= 0

    def arrived(self, request: Request, now: float) -> None:
        """The request waits."""
        if self._limits:
            self._of(request.tenant, now).queued += 1

    def started(self, request: Request, now: float) -> None:
        """The request runs."""
        if self._limits:
            tenant = self._of(request.tenant, now)
            tenant.queued -= 1
            tenant.running += 1
            if request.attempts == 1:
                tenant.tokens -= request.num_prompt_tokens

    def paused(self, request: Request, now: float) -> None:
        """The request runs no more and waits again."""
        if self._limits:
            tenant = self._of(request.tenant, now)
            tenant.running -= 1
            tenant.queued += 1

    def ended(self, request: Request, now: float, *, was_running: bool) -> None:
        """The request is over."""
        if not self._limits:
            return
        tenant = self._of(request.tenant, now)
        tenant.tokens -= request.num_generated
        if was_running:
            tenant.running -= 1
        else:
            tenant.queued -= 1

    def _of(self, name: str, now: float) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._many:
                self._forget_idle(now)
            full = BURST_S * self._limits_of(name).tokens_per_s
            tenant = self._tenants[name] = _Tenant(tokens=full, refilled=now)
        else:
            self._refill(tenant, self._limits_of(name), now)
        return tenant

    def _refill(self, tenant: _Tenant, limits: TenantLimits, now: float) -> None:
        rate = limits.tokens_per_s
        tenant.tokens = min(BURST_S * rate, tenant.tokens + rate * (now - tenant.refilled))
        tenant.refilled = now

    def _forget_idle(self, now: float) -> None:
        for name, tenant in list(self._tenants.items()):
            limits = self._limits_of(name)
            self._refill(tenant, limits, now)
            is_full = not limits.tokens_per_s or tenant.tokens >= BURST_S * limits.tokens_per_s
            if is_full and not tenant.running and not tenant.queued:
                del self._tenants[name]
        self._many = max(_FEW, 2 * len(self._tenants))

    def _limits_of(self, name: str) -> TenantLimits:
        return self._limits.get(name, self._limits.get("", _UNLIMITED))
