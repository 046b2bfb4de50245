"""Backlog: all waiting requests that have credit: competing, held or assigned.

A request *competes* while it may start as soon as there is room. It is then in a policy queue: usually in the common
queue. If only some kinds of workers can serve it, it is in a queue that other workers skip. A suspect request competes
to run alone (see `quarantine`).

A request that cannot start even with enough room is *held* until an event:

* it begins a session whose working set does not fit: until the gate opens (see `session_gate`);
* its tenant is at its limit: until the tenant may run more;
* its grammar is being compiled: until a worker reports it;
* another request computes its prefix, or its prefix is read from disk: until the next part of the prefix is there.

Plans do not consider held requests, and a held request blocks no other request. Under `fair`, it does not count as
waiting. Otherwise a tenant whose only request waits for its grammar would keep its low service, and returning tenants
would be raised only to that level.

If another worker can serve a request sooner, the request is *assigned* to this worker. It waits for the worker's next
plan, which considers assigned requests first. Requests that this plan does not admit compete again.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.queueing.holding import Holding
from scheduler_svc.core.queueing.policies import CachedTokens, KeyedQueue, Place, Policy, WaitingQueue
from scheduler_svc.core.queueing.session_gate import SessionGate
from scheduler_svc.core.queueing.shortest_first import ShortestFirst
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.accounts import Account
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import Match
from scheduler_svc.core.workers.kinds import Kinds, Scope
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import BlockKey

MAX_PREFIX_WAITS = 256
"""Maximum number of plans for which a request waits for a prefix that another request computes."""
MAX_ASSIGNED_S = 0.25
"""Maximum time that an assigned request waits for its worker's next plan, s."""
MAX_RETURNING_S = 2.0
"""The same for a request of an earlier scheduler and the worker that has its KV, s. After a takeover, thousands of them
keep the scheduler busy, and results wait to be read.
"""
_MAX_LOOKS = 16
"""Maximum number of unsuccessful grammar or prefix checks per plan. The next plan continues after them."""
_REFILL_S = 0.01
"""Minimum time between two checks of a tenant's token rate, s."""


class Backlog:
    """The waiting requests of one core that have credit."""

    def __init__(
        self, policy: Policy, tenants: Tenants, gate: SessionGate | None = None, *, serves_by_length: bool = True
    ) -> None:
        """Start empty, in the order of `policy`, within the limits of `tenants`; new sessions wait at `gate`.

        With `serves_by_length`, `take_short` finds the shortest request.
        """
        self.policy = policy
        self.gate = gate
        self._tenants = tenants
        self._num_requests = 0
        self.competing_tokens = 0
        """Uncached tokens of the requests that are not held for their tenant's quota."""
        self._competing: dict[Request, WaitingQueue | None] = {}
        """Competing requests with their queues; None while an admission considers the request."""
        self._common = policy.make_queue()
        self._restricted: dict[Scope | Worker, WaitingQueue] = {}
        """Queues by the workers that serve their requests, or by one draining worker; none is empty."""
        self._suspects = KeyedQueue(policy.rank)
        self._shortest = ShortestFirst(self._competing, policy.rank) if serves_by_length else None
        """The competing requests by length, without suspects; None if nothing is served by length."""
        self._late: dict[Request, int] = {}
        """Waiting requests that have missed their targets, with their token counts."""
        self.late_tokens = 0
        """Sum of their tokens."""
        self.kinds = Kinds()
        """Kinds of the workers that take requests."""
        self._workers: dict[Worker, None] = {}
        """The workers that accept requests."""
        self._draining: dict[int, Worker] = {}
        """Draining workers by epoch."""
        self._over_quota: Holding[tuple[str, bool]] = Holding(policy.rank)
        """Requests by tenant, and whether they have started."""
        self._for_grammar: Holding[bytes] = Holding(policy.rank)
        """Requests by grammar key."""
        self._compiled: dict[Worker, dict[bytes, None]] = {}
        """By worker, keys of compiled grammars that requests wait for. Some have no requests left."""
        self._for_prefix: Holding[tuple[Worker, BlockKey]] = Holding(policy.rank)
        """For each worker and the key of the block that it computes next, the requests that wait for this prefix."""
        self._prefixes: dict[Worker, dict[BlockKey, None]] = {}
        """By worker, the keys that requests wait for there. Some keys have no requests left."""
        self._assigned: Holding[Worker] = Holding(policy.rank)
        """Requests by worker, until its next plan."""
        self._assigned_since: dict[Worker, float] = {}
        """By worker, the time since which requests wait for its plan."""
        self._compiling: dict[bytes, Worker] = {}
        """By grammar key, the worker that was asked last and has not reported."""
        self._turns = _GrammarTurns(self._for_grammar)
        self._refills: list[tuple[float, str]] = []
        """A heap of (time, tenant): when a tenant with held requests may have tokens again; some entries are stale."""
        self._refilling: dict[str, float] = {}
        """By tenant, the time of its current heap entry."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._num_requests

    def __contains__(self, request: Request) -> bool:
        """Return whether the request waits here."""
        return request in self._competing or any(request in holding for holding in self._holdings())

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests, in no particular order."""
        return chain(self._competing, *self._holdings())

    @property
    def by_reason(self) -> dict[str, int]:
        """Number of requests by waiting reason."""
        return {
            "room": len(self._competing),
            "session": 0 if self.gate is None else len(self.gate.waiting),
            "tenant_limit": len(self._over_quota),
            "grammar": len(self._for_grammar),
            "prefix": len(self._for_prefix),
            "assigned_worker": len(self._assigned),
        }

    def first_by_reason(self, most: int) -> dict[str, list[Request]]:
        """Return the first requests that wait for each reason, at most `most` each.

        Competing requests are in policy order, after the suspect requests, which run alone. Held requests are in the
        order in which they were held.
        """
        queues = [self._common, *self._restricted.values()]
        competing = [request for queue in queues for request in queue.first_ones(most)]
        if len(queues) > 1:
            competing.sort(key=self.policy.place)
        held = (islice(holding, most) for holding in self._holdings())
        tenant_limit, grammar, prefix, assigned, *sessions = map(list, held)
        return {
            "room": [*self._suspects.first_ones(most), *competing][:most],
            "session": [request for each in sessions for request in each],
            "tenant_limit": tenant_limit,
            "grammar": grammar,
            "prefix": prefix,
            "assigned_worker": assigned,
        }

    @property
    def charges_output(self) -> bool:
        """Whether `charge` must be called with every generated token."""
        return self.policy.accounts_service or self._tenants.have_rates

    @property
    def serves_by_length(self) -> bool:
        """Whether `take_short` may be called: short requests overtake others, and no groups take turns."""
        return self._shortest is not None

    @property
    def num_ready(self) -> int:
        """Number of requests that may start when there is room."""
        return len(self._competing) + len(self._assigned)

    @property
    def num_late(self) -> int:
        """Number of waiting requests that have missed their targets."""
        return len(self._late)

    @property
    def num_startable(self) -> int:
        """Number of requests that a plan may take, including those that wait for a prefix on another worker."""
        return len(self._competing) + len(self._assigned) + len(self._for_prefix)

    @property
    def may_start(self) -> bool:
        """Whether any worker may be able to take a request, regardless of assignments."""
        num_at_gate = 0 if self.gate is None else len(self.gate.waiting)
        return len(self) > len(self._over_quota) + len(self._assigned) + num_at_gate

    @property
    def assigned_workers(self) -> Iterable[Worker]:
        """The workers for whose next plan requests wait."""
        return self._assigned.keys()

    def has_for(self, worker: Worker) -> bool:
        """Return whether a plan for the worker may admit a request."""
        if worker.draining:
            return worker in self._restricted
        if len(self._competing) or len(self._for_prefix) or self._assigned.count(worker):
            return True
        if worker in self._compiled:
            return True
        # Loop, because `any` is several times slower for an empty mapping and every plan runs this line.
        for key in self._for_grammar.keys():  # noqa: SIM110, SIM118
            if key not in self._compiling:
                return True
        return False

    def can_serve(self, worker: Worker, request: Request) -> bool:
        """Return whether the worker serves requests of this kind, or takes this request back."""
        if worker.draining:
            return self.returns_to(request) is worker
        return self.kinds.serves(worker.kind, request)

    def is_served(self, request: Request) -> bool:
        """Return whether a worker can serve the request or takes it back."""
        return self.kinds.serve(request) or self.returns_to(request) is not None

    def returns_to(self, request: Request) -> Worker | None:
        """Return the draining worker that takes back the request because no other worker serves it.

        As a result, a request that is preempted on a draining worker is not lost.
        """
        worker = self._draining.get(request.home)
        if worker is None or self.kinds.serve(request):
            return None
        return worker if worker.kind.holds(request) and worker.grammars.is_ready(request.grammar_key) else None

    def num_coming_home(self, worker: Worker) -> int:
        """Return the number of requests assigned to the worker, or 0 if no earlier scheduler ran the first one."""
        first = self._assigned.first(worker)
        return self._assigned.count(worker) if first is not None and first.is_returning else 0

    def num_assigned(self, worker: Worker) -> int:
        """Count the requests that wait for the worker's next plan."""
        return self._assigned.count(worker)

    # ---------------------------------------------------------------- arrivals and departures

    def push(self, request: Request, now: float) -> None:
        """Add a request."""
        self._num_requests += 1
        if self.gate is not None and not request.under_way and self.gate.holds(request, self._workers, now):
            request.waits_for(WaitReason.SESSION, now)
        else:
            self._pass_gate(request, now)

    def open_gate(self, now: float) -> None:
        """Let new sessions compete for which there is room now, or that have waited for too long."""
        if self.gate is not None:
            for request in self.gate.open(self._workers, now):
                request.waits_for(WaitReason.TURN, now)
                request.wait.released = now
                self._pass_gate(request, now)

    def _pass_gate(self, request: Request, now: float) -> None:
        if self._tenants.may_run(request, now):
            self._enter(request)
            if not self.kinds.all:
                request.waits_for(WaitReason.NO_WORKER, now)
        else:
            self._hold_for_tenant(request, now)

    def discard(self, request: Request) -> None:
        """Remove a request that has ended."""
        self._num_requests -= 1
        self.late_tokens -= self._late.pop(request, 0)
        if request in self._over_quota:
            self._over_quota.discard(request)
            return
        if self.gate is not None and request in self.gate.waiting:
            self.gate.discard(request)
            return
        if request in self._competing:
            queue = self._competing.pop(request)
            if queue is not None:
                queue.discard(request)
                self._drop_empty()
                if self._shortest is not None:
                    self._shortest.compact()
        elif request in self._assigned:
            self._assigned.discard(request)
        else:
            next(holding for holding in self._holdings() if request in holding).discard(request)
            self.competing_tokens -= request.wait.uncached
            self._tenants.competes(request.spec.tenant, -1)
            return
        self._left(request)

    def missed_target(self, request: Request) -> None:
        """Record that a taken request has missed its target, and put it back at its new place."""
        self._late[request] = request.wait.tokens
        self.late_tokens += request.wait.tokens
        self.put_back(request)

    def withdraw(self, request: Request) -> None:
        """Remove a request that was taken and is not put back."""
        self._num_requests -= 1
        self.late_tokens -= self._late.pop(request, 0)
        assert self._competing.pop(request) is None
        self._left(request)
        if self._shortest is not None:
            self._shortest.compact()

    def admitted(self, request: Request, worker: Worker) -> None:
        """Remove a request that was taken and is admitted to a worker."""
        if not self._restricted and not worker.draining:
            self._common.admitted(request)
        else:
            for queue in self._queues_of(worker):
                queue.admitted(request)
        self.withdraw(request)

    def tenant_changed(self, tenant: str, now: float) -> None:
        """Let held requests of a tenant compete, as many as the tenant may run now."""
        if not len(self._over_quota):
            return
        for started in (True, False):
            held = tenant, started
            while self._over_quota.count(held) and self._tenants.may_compete(tenant, now, started=started):
                request = self._over_quota.take(held)
                assert request is not None
                request.waits_for(WaitReason.TURN, now)
                request.wait.released = now
                self._enter(request)
        self._await_refill(tenant, now)

    def charge(self, charges: Sequence[tuple[Account, int]], now: float) -> None:
        """Charge generated tokens to their requests' accounts."""
        if self.policy.accounts_service:
            for account, num_tokens in charges:
                self.policy.served(account, output_tokens=num_tokens)
        if self._tenants.have_rates:
            for account, num_tokens in charges:
                self._tenants.charged(account.tenant, num_tokens, now)

    def time_passed(self, now: float) -> None:
        """Let requests compete if their tenant's token rate allows it now."""
        while self._refills and self._refills[0][0] <= now:
            time, tenant = heapq.heappop(self._refills)
            if self._refilling.get(tenant) == time:
                del self._refilling[tenant]
                self.tenant_changed(tenant, now)

    # ---------------------------------------------------------------- the next plan for one worker

    def take(self, worker: Worker, cached: CachedTokens) -> Request | None:
        """Take out the first request that the worker can serve, or return None.

        Args:
            worker: a worker for which `prepare` was called for this plan.
            cached: returns how many of a request's tokens the worker has cached; None if the worker has no free row.
        """
        request = self._take_competing(worker, cached)
        if request is not None:
            self._competing[request] = None
        return request

    def take_ahead(self, worker: Worker, place: Place) -> Request | None:
        """Take out the first request that the worker can serve if this request is ahead of `place`, or return None.

        The policy has keys.
        """
        if not self._restricted and not worker.draining:
            first = self.first()
            if first is None or self.policy.place(first) >= place:
                return None
        request = self.take(worker, None)
        if request is not None and self.policy.place(request) >= place:
            self.put_back(request)
            return None
        return request

    def take_short(self, worker: Worker, rest: int | None) -> Request | None:
        """Take out the shortest request that the worker can serve if it is shorter than `rest` tokens, or return None.

        The backlog must serve by length (`serves_by_length`), and the worker must not be draining.
        """
        assert self._shortest is not None
        request = self._shortest.first(lambda request: self.can_serve(worker, request))
        if request is None or (rest is not None and len(request.tokens) >= rest):
            return None
        self.take_this(request)
        return request

    def competes(self, request: Request) -> bool:
        """Return whether a request may be taken."""
        return self._competing.get(request) is not None

    def take_this(self, request: Request) -> None:
        """Take out a request that competes."""
        queue = self._competing[request]
        assert queue is not None
        queue.extract(request)
        self._competing[request] = None

    def take_assigned(self, worker: Worker) -> Request | None:
        """Take out the first request that is assigned to the worker, or return None."""
        request = self._assigned.take(worker)
        if request is not None:
            self._competing[request] = None
        return request

    def put_back(self, request: Request) -> None:
        """Put back a taken request, which keeps its place."""
        self._place(request)

    def first(self) -> Request | None:
        """Return the common queue's first request without taking it; None if the order depends on the worker."""
        return self._common.first() if isinstance(self._common, KeyedQueue) else None

    def prepare(self, worker: Worker, num_free_rows: int, now: float) -> None:
        """Let held requests compete whose grammar or prefix the worker now has."""
        for key in self._compiled.pop(worker, ()) if num_free_rows else ():
            if not worker.grammars.is_ready(key):
                continue
            # Release no more requests than the worker can take. A worker without the grammar would hold the others
            # again.
            self._compete_again(islice(self._for_grammar.release(key), num_free_rows), now)
            if self._for_grammar.count(key):
                self._compiled.setdefault(worker, {})[key] = None
        waited = self._prefixes.get(worker)
        for key in list(waited) if waited else ():
            if not worker.prefixes.is_awaited(key):
                self._prefix_advanced(worker, key, now)

    def recall(self, worker: Worker, now: float) -> list[Request]:
        """Let requests compete again that were assigned to a worker but not admitted by its plan; return them."""
        if self._assigned_since.pop(worker, None) is None:
            return []
        released = list(self._assigned.release(worker))
        for request in released:
            request.waits_for(WaitReason.TURN, now)
            self._place(request)
        return released

    def recall_late(self, is_due: Callable[[Worker], bool], now: float) -> list[Worker]:
        """Cancel old assignments to workers that can take no plan now, and return these workers.

        Their requests compete again. A worker whose plan is due only waits for the scheduler. After a takeover,
        thousands of requests are assigned to the workers with their KV, and planning them all takes longer.
        """
        late = [
            worker
            for worker, since in self._assigned_since.items()
            if now - since > self._patience(worker) and not is_due(worker)
        ]
        for worker in late:
            self.recall(worker, now)
        return late

    def _patience(self, worker: Worker) -> float:
        """Return how long requests stay assigned to a worker, s."""
        first = self._assigned.first(worker)
        return MAX_RETURNING_S if first is not None and first.is_returning else MAX_ASSIGNED_S

    def take_suspect(self) -> Request | None:
        """Take out the first suspect, or return None."""
        request = self._suspects.pop()
        if request is not None:
            self._competing[request] = None
        return request

    def take_for_prefix_elsewhere(self, worker: Worker, accepts: Callable[[Request, Worker], bool]) -> Request | None:
        """Take out a request that waits for its prefix on another worker, or return None.

        Args:
            worker: a worker that has room, and no competing requests left.
            accepts: returns whether `worker` would serve a request sooner than the other worker.
        """
        for key in list(islice(self._for_prefix.keys(), _MAX_LOOKS)):
            self._for_prefix.move_to_end(key)
            request = self._for_prefix.first(key) if key[0] is not worker else None
            if request is not None and self.can_serve(worker, request) and accepts(request, key[0]):
                self._for_prefix.take(key)
                self._begin_service(request)
                self._competing[request] = None
                return request
        return None

    # ---------------------------------------------------------------- selected requests that cannot start

    def hold_for_tenant(self, request: Request, now: float) -> None:
        """Hold a request until its tenant may run more."""
        self.withdraw(request)
        self._num_requests += 1
        self._hold_for_tenant(request, now)

    def hold_for_grammar(self, request: Request) -> None:
        """Hold a request until a worker has compiled its grammar."""
        del self._competing[request]
        self._end_service(request)
        if not self._for_grammar.count(request.grammar_key):
            for worker in self._workers:
                if worker.grammars.is_ready(request.grammar_key):
                    self._compiled.setdefault(worker, {})[request.grammar_key] = None
        self._for_grammar.add(request.grammar_key, request)
        self._turns.add(request)

    def hold_for_prefix(self, request: Request, worker: Worker, key: BlockKey) -> None:
        """Hold a request until the worker has computed the block with this key."""
        del self._competing[request]
        self._end_service(request)
        self._for_prefix.add((worker, key), request)
        self._prefixes.setdefault(worker, {})[key] = None

    def assign(self, request: Request, worker: Worker, now: float) -> None:
        """Let a request wait for the next plan of a worker."""
        del self._competing[request]
        self._assigned_since.setdefault(worker, now)
        request.wait.num_assigned += 1
        request.waits_for(WaitReason.ELSEWHERE, now)
        self._assigned.add(worker, request)

    def next_grammar(self, worker: Worker) -> Request | None:
        """Return a request whose grammar the worker should compile next; tenants take turns."""
        return self._turns.next(lambda key: self._should_compile(worker, key))

    def compiling(self, key: bytes, worker: Worker) -> None:
        """Record that a worker was asked for a grammar."""
        self._compiling[key] = worker

    # ---------------------------------------------------------------- workers

    def fleet_changed(self, workers: Iterable[Worker], now: float) -> None:
        """Sort the requests again by the workers that can serve them."""
        present: dict[Worker, None] = {}
        draining: dict[int, Worker] = {}
        for worker in workers:
            if worker.draining:
                draining[worker.epoch] = worker
            else:
                present[worker] = None
        for worker in list(dict.fromkeys(chain(self._prefixes, self._assigned.keys()))):
            if worker not in present:
                self._worker_left(worker, now)
        # Ask another worker to compile the grammars that a lost worker was compiling.
        self._compiling = {key: worker for key, worker in self._compiling.items() if worker in present}
        for key in list(self._for_grammar.keys()):
            self._compete_again(self._for_grammar.release(key), now)
        self._workers = present
        self._compiled.clear()
        kinds = {worker.kind for worker in present}
        if kinds == self.kinds.all and draining == self._draining:
            return
        if bool(kinds) != bool(self.kinds.all):
            reason = WaitReason.TURN if kinds else WaitReason.NO_WORKER
            for request in self._competing:
                request.waits_for(reason, now)
        self.kinds, self._draining = Kinds(kinds), draining
        self._sort_again()

    def grammar_reported(self, key: bytes, now: float) -> None:
        """Let the requests compete that wait for this grammar, because a worker compiled it or cannot."""
        self._compiling.pop(key, None)
        self._compete_again(self._for_grammar.release(key), now)

    def validate(self) -> None:
        """Check that every request is in one place, and that the queues hold exactly the competing requests."""
        assert None not in self._competing.values(), "an admission has not put a request back"
        queues = [self._common, *self._restricted.values(), self._suspects]
        assert sum(len(queue) for queue in queues) == len(self._competing)
        assert self.competing_tokens == sum(
            each.wait.uncached
            for each in self
            if each not in self._over_quota and (self.gate is None or each not in self.gate.waiting)
        )
        assert len(set(self)) == len(list(self)) == self._num_requests, "a request waits twice, or is miscounted"

    # ----------------------------------------------------------------

    def _holdings(self) -> "tuple[Holding[Any], ...]":
        holdings = self._over_quota, self._for_grammar, self._for_prefix, self._assigned
        return holdings if self.gate is None else (*holdings, self.gate.waiting)

    def _should_compile(self, worker: Worker, key: bytes) -> bool:
        return key not in self._compiling and not worker.grammars.is_known(key)

    def _hold_for_tenant(self, request: Request, now: float) -> None:
        over_rate = not request.under_way and self._tenants.refilled_at(request.spec.tenant, now) is not None
        request.waits_for(WaitReason.TENANT_RATE if over_rate else WaitReason.TENANT_LIMIT, now)
        self._over_quota.add((request.spec.tenant, request.under_way), request)
        self._await_refill(request.spec.tenant, now)

    def _await_refill(self, tenant: str, now: float) -> None:
        """Schedule a check of a tenant's held requests for the time when its token rate may permit one.

        The check happens earlier if a running request ends with less output than it has reserved.
        """
        if not self._over_quota.count((tenant, False)):
            return
        refilled = self._tenants.refilled_at(tenant, now)
        if refilled is None:
            return
        refilled = max(refilled, now + _REFILL_S)
        if refilled + _REFILL_S < self._refilling.get(tenant, math.inf):
            self._refilling[tenant] = refilled
            heapq.heappush(self._refills, (refilled, tenant))
            if len(self._refills) > 64 + 2 * len(self._refilling):
                self._refills = [(time, name) for name, time in self._refilling.items()]
                heapq.heapify(self._refills)

    def _enter(self, request: Request) -> None:
        self.competing_tokens += request.wait.uncached
        self._tenants.competes(request.spec.tenant, 1)
        self._begin_service(request)
        self._place(request)

    def _left(self, request: Request) -> None:
        self.competing_tokens -= request.wait.uncached
        self._end_service(request)
        self._tenants.competes(request.spec.tenant, -1)

    def _begin_service(self, request: Request) -> None:
        if self.policy.accounts_service:
            self.policy.enter(request.account)

    def _end_service(self, request: Request) -> None:
        if self.policy.accounts_service:
            self.policy.leave(request.account)

    def _compete_again(self, requests: Iterable[Request], now: float) -> None:
        """Let requests compete that were held for a grammar or a prefix."""
        for request in requests:
            request.waits_for(WaitReason.TURN, now)
            self._begin_service(request)
            self._place(request)

    def _place(self, request: Request) -> None:
        """Put a request into the queue in which it competes."""
        queue: WaitingQueue
        if request.faults.suspect:
            queue = self._suspects
        elif (place := self._takers(request)) is None:
            queue = self._common
        else:
            if place not in self._restricted:
                self._restricted[place] = self.policy.make_queue()
            queue = self._restricted[place]
        queue.push(request)
        self._competing[request] = queue
        if self._shortest is None:
            return
        if queue is self._suspects:
            self._shortest.discard(request)  # The request may have become a suspect request while it waited.
        else:
            self._shortest.push(request)

    def _takers(self, request: Request) -> Scope | Worker | None:
        """Return the workers that may take the request, or the draining worker to which it returns; None for any."""
        scope = self.kinds.scope(request)
        return self.returns_to(request) if scope is None and self._draining else scope

    def _sort_again(self) -> None:
        """Move requests whose workers have changed to their new queues; other requests stay in place."""
        left: dict[WaitingQueue, None] = {}
        moved = []
        for request, queue in self._competing.items():
            if queue is None or queue is self._suspects:
                continue
            place = self._takers(request)
            if (self._common if place is None else self._restricted.get(place)) is not queue:
                moved.append(request)
                left[queue] = None
        if not moved:
            return
        leaving = frozenset(moved)
        for queue in left:
            queue.remove(leaving)
        self._drop_empty()
        for request in moved:
            self._place(request)

    def _drop_empty(self) -> None:
        if self._restricted:
            self._restricted = {place: queue for place, queue in self._restricted.items() if len(queue)}

    def _queues_of(self, worker: Worker) -> list[WaitingQueue]:
        """Return the queues from which the worker takes requests."""
        if worker.draining:
            own = self._restricted.get(worker)
            return [] if own is None else [own]
        queues = [self._common]
        for place, queue in self._restricted.items():
            if isinstance(place, Scope) and self.kinds.contains(place, worker.kind):
                queues.append(queue)
        return queues

    def _take_competing(self, worker: Worker, cached: CachedTokens) -> Request | None:
        if not self._restricted and not worker.draining:
            return self._common.take(cached)
        queues = self._queues_of(worker)
        first = [(queue, request) for queue in queues if (request := queue.take(cached)) is not None]
        if not first:
            return None
        _, chosen = min(first, key=lambda each: self.policy.place(each[1]))
        for queue, request in first:
            if request is not chosen:
                queue.push(request)
        self._drop_empty()
        return chosen

    def _prefix_advanced(self, worker: Worker, key: BlockKey, now: float) -> None:
        """Release the first request that waits for this block, which was computed or abandoned.

        This request looks up the prefix for all requests that wait for it.
        """
        del self._prefixes[worker][key]
        first = self._for_prefix.first((worker, key))
        if first is None:
            return
        match = worker.prefixes.match(first)
        if waits_for_prefix(worker, first, match):
            self._for_prefix.rename((worker, key), (worker, match.next_key))
            self._prefixes[worker][match.next_key] = None
            return
        for request in self._for_prefix.release((worker, key)):
            request.prefix_waits = first.prefix_waits
            self._compete_again((request,), now)

    def _worker_left(self, worker: Worker, now: float) -> None:
        self.recall(worker, now)
        for key in self._prefixes.pop(worker, ()):
            self._compete_again(self._for_prefix.release((worker, key)), now)


class _GrammarTurns:
    """Round-robin over tenants for compilation, regardless of the number of grammars per tenant."""

    def __init__(self, waiting: Holding[bytes]) -> None:
        """Start empty; `waiting` contains the requests that wait for a grammar, by the grammar's key."""
        self._waiting = waiting
        self._keys: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        """By tenant, in turn: keys of grammars. Some tenants have no requests left."""
        self._num_keys = 0

    def add(self, request: Request) -> None:
        """Record that a request waits for its grammar."""
        keys = self._keys.setdefault(request.spec.tenant, {})
        self._num_keys += request.grammar_key not in keys
        keys[request.grammar_key] = None
        if self._num_keys > 64 + 2 * len(self._waiting):
            for tenant in list(self._keys):
                self._drop_unused(tenant, len(self._keys[tenant]))

    def next(self, accepts: Callable[[bytes], bool]) -> Request | None:
        """Return a request whose grammar `accepts` approves, or None."""
        for _ in range(min(len(self._keys), _MAX_LOOKS)):
            tenant = next(iter(self._keys))
            self._keys.move_to_end(tenant)
            for key in self._drop_unused(tenant, _MAX_LOOKS):
                if accepts(key):
                    return self._waiting.first(key)
                del self._keys[tenant][key]
                self._keys[tenant][key] = None
        return None

    def _drop_unused(self, tenant: str, most: int) -> list[bytes]:
        """Among a tenant's oldest `most` grammars, drop those without waiting requests; return the others."""
        keys, used = self._keys[tenant], []
        for key in list(islice(keys, most)):
            if self._waiting.count(key):
                used.append(key)
            else:
                del keys[key]
                self._num_keys -= 1
        if not keys:
            del self._keys[tenant]
        return used


def waits_for_prefix(worker: Worker, request: Request, match: Match) -> bool:
    """Return whether a request waits for the block after its cached prefix, and count these waits."""
    if match.swapped is not None or not worker.prefixes.is_awaited(match.next_key):
        return False
    request.prefix_waits += 1
    return request.prefix_waits <= MAX_PREFIX_WAITS
