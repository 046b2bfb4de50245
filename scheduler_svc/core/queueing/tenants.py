"""Limits per tenant: the number of waiting and running requests, and the rate of tokens.

Waiting requests and their tokens are counted for every tenant, because the waiting queue has a share for each (see
`AdmissionControl`). The admission file sets all other limits.

The rate is a token bucket that holds ten seconds' worth. A request's prompt is deducted once, when it starts, and each
generated token when it is delivered. When it starts, a request also *reserves* its expected output, as learned from
finished requests (or its `max_tokens` if no request has finished). A request starts only while the bucket covers the
reservations of running requests, so that many simultaneous starts do not overdraw the bucket. A single long request may
overdraw it; the tenant's next request then starts only after the bucket is refilled. A started request is never held
for the rate, even after an interruption.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.requests.request import Request

BURST_S = 10.0
_REVIEW_S = 0.5
"""Time after which a tenant is checked again if its running requests have reserved more than its bucket contains, s."""
_UNLIMITED = TenantLimits()
_MAX_COMPETING = 8
"""Maximum number of competing requests per tenant with a token rate. The others are held."""
_FEW = 64
"""Minimum number of tenants before the table is searched for tenants to drop."""


@dataclass(slots=True)
class _Tenant:
    queued: int = 0
    queued_tokens: int = 0
    """Tokens of the queued requests."""
    running: int = 0
    competing: int = 0
    """Number of queued requests that compete for admission."""
    tokens: float = 0.0
    """Tokens in the bucket; negative for a debt."""
    refilled: float = 0.0
    reserved: int = 0
    """Tokens that started requests will probably generate."""

    @property
    def spare(self) -> float:
        """Tokens in the bucket that are not reserved."""
        return self.tokens - max(0, self.reserved)


class Tenants:
    """Current use of every tenant with live requests or a bucket that is not full.

    All other tenants are equal to new tenants. They are dropped whenever the table has doubled, because clients may
    choose arbitrary tenant names.
    """

    def __init__(self, limits: dict[str, TenantLimits]) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self._many = _FEW
        self.have_rates = any(each.tokens_per_s for each in limits.values())
        """Whether `charged` must be called with every token that is delivered."""

    def __len__(self) -> int:
        return len(self._tenants)

    def may_queue(self, request: Request) -> bool:
        """Return whether one more request may wait."""
        if not self._limits:
            return True
        limits = self._limits_of(request.spec.tenant)
        tenant = self._tenants.get(request.spec.tenant)
        return not limits.max_queued or tenant is None or tenant.queued < limits.max_queued

    def num_queued(self, name: str) -> tuple[int, int]:
        """Return a tenant's number of waiting requests, and their number of tokens."""
        tenant = self._tenants.get(name)
        return (0, 0) if tenant is None else (tenant.queued, tenant.queued_tokens)

    def num_running(self, name: str) -> int:
        """Return the number of a tenant's running requests."""
        tenant = self._tenants.get(name)
        return 0 if tenant is None else tenant.running

    def may_run(self, request: Request, now: float) -> bool:
        """Return whether the request may start."""
        if not self._limits:
            return True
        limits = self._limits_of(request.spec.tenant)
        if limits is _UNLIMITED:
            return True
        tenant = self._of(request.spec.tenant, now)
        if limits.max_running and tenant.running >= limits.max_running:
            return False
        return not limits.tokens_per_s or request.under_way or tenant.spare >= 0

    def may_compete(self, name: str, now: float, *, started: bool) -> bool:
        """Return whether the quota lets another request of the tenant compete, started or not."""
        limits = self._limits_of(name)
        tenant = self._of(name, now)
        if limits.max_running and tenant.running + tenant.competing >= limits.max_running:
            return False
        # The number of requests that a rate allows depends on which one starts first.
        return not limits.tokens_per_s or started or (tenant.spare >= 0 and tenant.competing < _MAX_COMPETING)

    def competes(self, name: str, change: int) -> None:
        """Add `change` to the number of competing requests of a tenant."""
        if self._limits:
            self._tenants[name].competing += change

    def refilled_at(self, name: str, now: float) -> float | None:
        """Return when the tenant's token rate may allow a request; None if the rate is not the obstacle."""
        limits = self._limits_of(name)
        tenant = self._of(name, now)
        if not limits.tokens_per_s or tenant.spare >= 0:
            return None
        room = BURST_S * limits.tokens_per_s - tenant.tokens
        if -tenant.spare <= room:
            return now - tenant.spare / limits.tokens_per_s
        # Even a full bucket may not suffice. Check again after running requests have generated some tokens.
        return now + max(room / limits.tokens_per_s, _REVIEW_S)

    def arrived(self, request: Request, now: float) -> None:
        """Record that the request waits."""
        self._of(request.spec.tenant, now).queued += 1

    def queue_tokens(self, name: str, change: int) -> None:
        """Add `change` to the tokens of a tenant's waiting requests."""
        self._tenants[name].queued_tokens += change

    def started(self, request: Request, output_tokens: float, now: float) -> None:
        """Record that the request runs and will probably generate this many tokens in total."""
        tenant = self._of(request.spec.tenant, now)
        tenant.queued -= 1
        tenant.running += 1
        if not self._limits:
            return
        if not request.prompt_charged:
            tenant.tokens -= request.spec.num_prompt_tokens
            request.prompt_charged = True
        if request.reserved_output is None and self._limits_of(request.spec.tenant).tokens_per_s:
            request.reserved_output = max(request.num_generated, math.ceil(output_tokens))
            tenant.reserved += request.reserved_output - request.num_generated

    def charged(self, name: str, num_tokens: int, now: float) -> None:
        """Deduct tokens that a tenant's requests have generated from its bucket."""
        if self._limits_of(name).tokens_per_s:
            tenant = self._of(name, now)
            tenant.tokens -= num_tokens
            tenant.reserved -= num_tokens

    def paused(self, request: Request, now: float) -> None:
        """Record that the request was preempted and waits again."""
        tenant = self._of(request.spec.tenant, now)
        tenant.running -= 1
        tenant.queued += 1

    def ended(self, request: Request, now: float, *, was_running: bool) -> None:
        """Record that the request has ended."""
        tenant = self._of(request.spec.tenant, now)
        if request.reserved_output is not None:
            tenant.reserved -= request.reserved_output - request.num_generated
        if was_running:
            tenant.running -= 1
        else:
            tenant.queued -= 1

    def validate(self, waiting: Iterable[Request]) -> None:
        """Check that each tenant's counts equal those of its waiting requests."""
        queued: dict[str, tuple[int, int]] = {}
        for request in waiting:
            number, tokens = queued.get(request.spec.tenant, (0, 0))
            queued[request.spec.tenant] = number + 1, tokens + request.wait.tokens
        for name in self._tenants.keys() | queued.keys():
            assert self.num_queued(name) == queued.get(name, (0, 0)), f"tenant {name!r}: waiting requests miscounted"

    def _of(self, name: str, now: float) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= self._many:
                self._forget_idle(now)
            full = BURST_S * self._limits_of(name).tokens_per_s
            tenant = self._tenants[name] = _Tenant(tokens=full, refilled=now)
        elif self._limits:
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
