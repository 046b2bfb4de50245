"""A model of each tenant's quotas: running and waiting requests, and a token bucket."""

from collections import Counter

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig, TenantLimits
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.queueing.tenants import BURST_S
from scheduler_svc.sim.coverage import Limit
from scheduler_svc.sim.promises.base import Promise, Watched
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.stream import Stream
from scheduler_svc.sim.violation import StreamName, ViolationError

_NO_LIMITS = TenantLimits()
_TOLERANCE = 1e-6
"""Tolerance in tokens, because the two sides add up the same numbers in different order."""


def limits_of(config: CoreConfig, tenant: str) -> TenantLimits:
    """Return the limits of a tenant."""
    limits = config.tenant_limits
    return limits.get(tenant, limits.get("", _NO_LIMITS))


class _Bucket:
    """Tokens that a tenant may still use; below zero, no request of the tenant starts."""

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
        """Remove tokens, also more than the bucket has."""
        self._tokens = self.level(now) - tokens


class Quotas(Promise):
    """A tenant has at most `max_running` requests in rows, and none starts while its token bucket is overdrawn.

    A request takes its prompt from the bucket at its first start and its output at its end, each once.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}
        self._paid: dict[Stream, int] = {}
        """Output tokens that a stream had on arrival; its prompt was counted, too."""
        self._doubtful: Counter[str] = Counter()
        """By tenant: tokens that its bucket may have in addition to those that it certainly has."""

    def may_start(self, stream: Stream) -> bool:
        """Return whether the quota of its tenant lets a stream start."""
        limits = limits_of(self.config, stream.demand.tenant)
        if limits.max_running and self._running[stream.demand.tenant] >= limits.max_running:
            return False
        return not limits.tokens_per_s or self._bucket(stream).level(self.world.now) >= _TOLERANCE

    def has_any(self, stream: Stream) -> bool:
        """Return whether the tenant of a stream has a quota of running requests or of tokens."""
        limits = limits_of(self.config, stream.demand.tenant)
        return bool(limits.max_running or limits.tokens_per_s)

    def may_be_last(self, stream: Stream) -> bool:
        """Return whether other waiting requests of the tenant may use up its present quota."""
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
            if stream is not None and stream.tokens and not self.book.knows(stream):
                self._paid[stream] = len(stream.tokens)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        tenant, limits = stream.demand.tenant, limits_of(self.config, stream.demand.tenant)
        self._running[tenant] += 1
        if limits.max_running and self._running[tenant] > limits.max_running:
            raise ViolationError("limit.tenant", f"{self._running[tenant]} of tenant {tenant!r} run", stream.name)
        if not limits.tokens_per_s:
            return
        bucket, now = self._bucket(stream), self.world.now
        level = bucket.level(now) + self._doubtful[tenant]
        if level < -_TOLERANCE:
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
        if limits_of(self.config, stream.demand.tenant).tokens_per_s:
            self._bucket(stream).take(len(stream.tokens) - self._paid.pop(stream, 0), self.world.now)
