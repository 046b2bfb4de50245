"""Gate for new sessions: a session starts only while all working sets of active sessions fit into the KV memory.

More sessions than fit evict each other's prefixes while they pause, so that every turn computes its whole prompt. The
gate holds the first turns of new sessions instead. Later turns always pass, and so do requests whose kind rarely
returns.

The working set of a session is its sequence now and in its next turns, without the tokens that it shared when it began.
A pausing session counts with the chance that it returns before the workers could compute as many prompt tokens as their
KV caches hold. A longer pause is not worth its memory: others can use it, and computing the prefix again is cheaper.
With host memory, somewhat more sessions have room. With KV groups that have a window, a session also needs blocks for
its windows: while it is active, those of a row and of the end before it; while it pauses, those of its end.

* A session that is held for the longest wait, or until the latest start that meets its targets, passes in any case.
* If several tenants have sessions, each may start sessions up to its equal part of the memory, whatever others hold.
  Otherwise the tenant with the smallest working sets is first.
* Without active sessions, the gate is open, however large the session is.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import Float64Array
from scheduler_svc.core.queueing.holding import Holding
from scheduler_svc.core.queueing.policies import Policy
from scheduler_svc.core.queueing.sessions import NO_WINDOWS, TURNS_AHEAD, Sessions, WindowNeed, tenant_number
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.worker import Worker

_HOST_PART = 4
"""If copies delay steps, host memory counts as room up to this part of the KV cache. More of it would hold more
sessions, but they would wait for each other's copies.
"""
_PATIENCE = 1.5
"""Longest pause that counts, in units of the time to compute the contents of the whole KV cache."""


@dataclass(slots=True)
class GateCounters:
    """Counters of requests that waited at the gate."""

    held: int = 0
    passed: int = 0
    timed_out: int = 0
    """Those of the passed ones that reached the bound."""
    waited_s: float = 0.0
    """Sum of the waits of the passed ones, s."""


class SessionGate:
    """The requests that wait at the gate, and the decision which of them pass."""

    def __init__(self, sessions: Sessions, policy: Policy, longest_wait_s: float) -> None:
        """Hold nothing; requests of a tenant pass in the order of `policy`, after at most `longest_wait_s`."""
        self._sessions = sessions
        self._longest_wait_s = longest_wait_s
        self.waiting: Holding[str] = Holding(policy.rank)
        """Requests by tenant."""
        self._until: dict[Request, float] = {}
        """By request, the time at which it passes in any case."""
        self._next_due = math.inf
        """Lower bound of these times."""
        self.counters = GateCounters()

    def holds(self, request: Request, workers: Iterable[Worker], now: float) -> bool:
        """Return whether a new request must wait, and hold it then."""
        if not self._sessions.begins(request):
            self._sessions.pass_gate(request)  # It may have been held before the workers changed.
            return False
        until = min(request.wait.since + self._longest_wait_s, *_latest(request))
        if until <= now:
            self._sessions.pass_gate(request)
            return False
        self._sessions.wait_at_gate(request)
        if not self.waiting.count(request.spec.tenant) and self._fits(request, _Demand(self, workers, now)):
            self._sessions.pass_gate(request)
            return False
        self.waiting.add(request.spec.tenant, request)
        self._until[request] = until
        self._next_due = min(self._next_due, until)
        self.counters.held += 1
        return True

    def discard(self, request: Request) -> None:
        """Remove a request that has ended."""
        self.waiting.discard(request)
        del self._until[request]

    def open(self, workers: Iterable[Worker], now: float) -> Iterator[Request]:
        """Take out the requests that may pass now."""
        if not len(self.waiting):
            return
        if now >= self._next_due:
            for request in [each for each, until in self._until.items() if until <= now]:
                self.counters.timed_out += 1
                self.waiting.discard(request)
                yield self._pass(request, now)
            self._next_due = min(self._until.values(), default=math.inf)
        demand = _Demand(self, workers, now)
        while tenant := self._next_tenant(demand):
            first = self.waiting.take(tenant[0])
            assert first is not None
            demand.add(self._sessions.own_demand(first, demand.windows), tenant[0])
            yield self._pass(first, now)

    def _next_tenant(self, demand: "_Demand") -> tuple[str] | None:
        """Return the tenant whose first request may pass, or None."""
        for tenant in sorted(self.waiting.keys(), key=demand.of):
            first = self.waiting.first(tenant)
            if first is not None and self._fits(first, demand):
                return (tenant,)
        return None

    def _fits(self, request: Request, demand: "_Demand") -> bool:
        return demand.has_room(self._sessions.own_demand(request, demand.windows), request.spec.tenant)

    def _pass(self, request: Request, now: float) -> Request:
        del self._until[request]
        self._sessions.pass_gate(request)
        self.counters.passed += 1
        self.counters.waited_s += now - request.wait.since
        return request


class _Demand:
    """Working sets of the active sessions, by tenant, and the memory for them."""

    def __init__(self, gate: SessionGate, workers: Iterable[Worker], now: float) -> None:
        tokens, horizon_s = 0, math.inf
        workers = list(workers)
        needs = [window_need(worker) for worker in workers if worker.windows is not None]
        self.windows = max(needs, key=lambda need: need.num_tables * need.active, default=NO_WINDOWS)
        part = gate._sessions.sequence_part(self.windows)
        for worker in workers:
            num_blocks = worker.pool.num_blocks
            if worker.swap.pays:
                num_host = worker.swap.pool.num_blocks
                if not worker.swap.overlaps:
                    num_host = min(num_host, num_blocks // _HOST_PART)
                num_blocks += num_host
            num_tokens = num_blocks * worker.rows.block_size
            tokens += num_tokens
            horizon_s = min(horizon_s, _PATIENCE * part * num_tokens * worker.costs.prompt_token_s)
        self._room = tokens if tokens else math.inf
        self._by_tenant = gate._sessions.demand(horizon_s if tokens else 0.0, now, self.windows)
        self._total: Float64Array = sum(self._by_tenant.values(), np.zeros(len(TURNS_AHEAD)))
        self._tenants = {*self._by_tenant, *map(tenant_number, gate.waiting.keys())}

    def of(self, tenant: str) -> float:
        """Return a tenant's largest demand in tokens."""
        demand = self._by_tenant.get(tenant_number(tenant))
        return 0.0 if demand is None else float(demand.max())

    def has_room(self, more: Float64Array, tenant: str) -> bool:
        """Return whether a tenant's working set fits, or is within the tenant's part of the memory."""
        if (self._total + more).max() <= self._room or not self._total.any():
            return True
        number = tenant_number(tenant)
        own = self._by_tenant.get(number)
        most = float((more if own is None else own + more).max())
        return most * len(self._tenants | {number}) <= self._room if len(self._tenants | {number}) > 1 else False

    def add(self, more: Float64Array, tenant: str) -> None:
        """Add the working set of a session that passes."""
        self._total = self._total + more
        number = tenant_number(tenant)
        own = self._by_tenant.get(number)
        self._by_tenant[number] = more if own is None else own + more


def window_need(worker: Worker) -> WindowNeed:
    """Return the memory for the windows of a session on a worker with windows."""
    windows, size = worker.windows, worker.rows.block_size
    assert windows is not None
    return WindowNeed(windows.num_tables, (windows.period + windows.tail) * size, windows.tail * size)


def _latest(request: Request) -> list[float]:
    return [time for time in (request.wait.latest_start, request.wait.must_start) if time is not None] or [math.inf]
