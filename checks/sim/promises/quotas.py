"""A model of each tenant's quotas: running and waiting requests, and a token bucket."""

from collections import Counter

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig, TenantLimits
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.queueing.tenants import BURST_S

_NO_LIMITS = TenantLimits()
_TOLERANCE = 1e-6
"""Tolerance in tokens, because both sides add the same numbers in different order."""


def limits_of(config: CoreConfig, tenant: str) -> TenantLimits:
    limits = config.tenant_limits
    return limits.get(tenant, limits.get("", _NO_LIMITS))


class _Bucket:
    """Remaining tokens for a tenant. Below zero, no request of the tenant starts."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._tokens = rate * BURST_S
        self._filled = now

    def level(self, now: float) -> float:
        """Return the tokens in the bucket."""
        self._tokens = min(self._rate * BURST_S, self._tokens + self._rate * (now - self._filled))
        self._filled = now
        return self._tokens

    def take(self, tokens: int, now: float) -> None:
        """Remove tokens, even more than the bucket contains."""
        self._tokens = self.level(now) - tokens


class Quotas(Promise):
    """A tenant has at most `max_running` requests in rows, and no new one starts while its token bucket is overdrawn.

    A request's prompt is charged to the bucket once, at its first start, and each token once, when it is delivered. A
    request may also have to wait if started requests may generate more tokens than the bucket holds.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}
        self._counted: dict[Stream, int] = {}
        """By live stream of a tenant with a rate: tokens already deducted, or delivered by an earlier core."""
        self._paid: set[Stream] = set()
        """Streams that had tokens on arrival. Their prompts were deducted then."""
        self._doubtful: Counter[str] = Counter()
        """By tenant, tokens that its bucket may contain in addition to the certain ones."""

    def may_start(self, stream: Stream) -> bool:
        """Return whether the tenant's quota allows a stream to start."""
        limits = limits_of(self.config, stream.demand.tenant)
        if limits.max_running and self._running[stream.demand.tenant] >= limits.max_running:
            return False
        if not limits.tokens_per_s or stream.is_under_way:
            return True
        reserved = sum(
            other.demand.max_tokens - len(other.tokens)
            for other in self.clients.live.values()
            if other.placements and other.demand.tenant == stream.demand.tenant
        )
        return self._bucket(stream).level(self.world.now) >= reserved + _TOLERANCE

    def has_any(self, stream: Stream) -> bool:
        """Return whether a stream's tenant has a quota for running requests or tokens."""
        limits = limits_of(self.config, stream.demand.tenant)
        return bool(limits.max_running or limits.tokens_per_s)

    def may_be_last(self, stream: Stream) -> bool:
        """Return whether other waiting requests of the tenant may use up its quota."""
        tenant = stream.demand.tenant
        limits = limits_of(self.config, tenant)
        if not self.has_any(stream):
            return False
        waiting = sum(other.demand.tenant == tenant for other in self.book.waiting)
        left = limits.max_running - self._running[tenant] if limits.max_running else waiting
        return waiting > left or (limits.tokens_per_s > 0 and waiting > 1)

    def _bucket(self, stream: Stream) -> _Bucket:
        tenant = stream.demand.tenant
        bucket = self._buckets.get(tenant)
        if bucket is None:
            rate = limits_of(self.config, tenant).tokens_per_s
            bucket = self._buckets[tenant] = _Bucket(rate, self.world.now)
        return bucket

    def before(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestArrived):
            stream = self.clients.live.get(StreamName(event.frontend, event.stream))
            if stream is not None and not self.book.knows(stream) and self._has_rate(stream):
                self._counted[stream] = len(stream.tokens)
                if stream.tokens:
                    self._paid.add(stream)

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if isinstance(event, ev.StepDone):
            for stream in self._counted:
                self._count(stream)

    def _count(self, stream: Stream) -> None:
        new = len(stream.tokens) - self._counted[stream]
        if new:
            self._bucket(stream).take(new, self.world.now)
            self._counted[stream] += new

    def _has_rate(self, stream: Stream) -> bool:
        return limits_of(self.config, stream.demand.tenant).tokens_per_s > 0

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        tenant, limits = stream.demand.tenant, limits_of(self.config, stream.demand.tenant)
        self._running[tenant] += 1
        if limits.max_running and self._running[tenant] > limits.max_running:
            raise ViolationError("limit.tenant", f"{self._running[tenant]} of tenant {tenant!r} run", stream.name)
        if not limits.tokens_per_s:
            return
        bucket, now = self._bucket(stream), self.world.now
        level = bucket.level(now) + self._doubtful[tenant]
        is_new = stream.placements == 1 and not stream.was_accepted and not stream.tokens and not stream.identity
        if level < -_TOLERANCE and is_new:
            raise ViolationError("limit.tenant_rate", f"tenant {tenant!r} has {level:.1f} tokens", stream.name)
        if stream.placements == 1 and stream not in self._paid:
            bucket.take(len(stream.demand.prompt), now)
            # An earlier call may have paid for the prompt.
            self._doubtful[tenant] += len(stream.demand.prompt) if stream.identity else 0
        self.seen(Limit.BUCKET)

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        self._running[stream.demand.tenant] -= 1

    def ended(self, stream: Stream) -> None:
        if stream.epoch is not None:
            self._running[stream.demand.tenant] -= 1
        if stream in self._counted:
            self._count(stream)
            del self._counted[stream]
            self._paid.discard(stream)
