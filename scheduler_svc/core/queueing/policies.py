"""Policies: the orders in which waiting requests are admitted.

A `Policy` defines an order, holds the order's state, such as each tenant's service, and creates queues. All queues of a
policy share its state. `take` returns a queue's first request. A request that cannot start is put back with `push` and
keeps its place.

If a request ends while it waits, its entry remains in the heap. The heap is rebuilt when half of its entries are stale,
so its memory is proportional to the number of live requests.

Most policies order requests by a *key*, a time in seconds that is fixed when the request is queued. The smallest key is
first, and ties are broken by arrival order. Ageing needs no clock, because "arrival minus bonus" always yields the same
order as "time waited plus bonus". No request starves, because only requests that arrive within a limited time, their
advantage in the key, can overtake it.

| policy | key | overtaken only by requests that arrive at most |
|---|---|---|
| fcfs | order of arrival | 0 s later |
| priority | arrival - priority x `AGEING_S` | (their priority - its own) x `AGEING_S` later |
| sjf | arrival + `SJF_S_PER_TOKEN` x expected tokens | `SJF_S_PER_TOKEN` x its expected tokens later |
| edf | latest start that still meets the deadline | its slack later; without one, `EDF_SLACK_S` later |
| slo | as edf; each request has a target for its first token | its slack later; once missed, `SLO_LATE_S` later |

Under `edf`, a request that has missed its target ranks behind all requests that were waiting at that time with no more
slack than its initial slack, or `EDF_SLACK_S`. It therefore does not delay requests that can still be in time, and it
does not starve.

`fair` (virtual token counter, Sheng et al., OSDI 2024) serves the tenant with the least service. `lpm` (longest prefix
match, SGLang) ranks a window of the oldest requests by their cached tokens. `fair` does the same for each tenant, as in
deficit longest prefix match (arXiv 2501.14312), but without a deficit between tenants. If request
classes are configured, each class has its own policy, and classes take turns like tenants under `fair`.
"""

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from scheduler_svc.core.interface.config import RequestClass
from scheduler_svc.core.queueing.service_ledger import ServiceLedger
from scheduler_svc.core.requests.accounts import Account
from scheduler_svc.core.requests.request import Request

AGEING_S = 10.0
"""Waiting time that weighs as much as one level of priority, s."""
SJF_S_PER_TOKEN = 0.05
"""Later arrival that weighs as much as one expected output token, in seconds."""
EDF_SLACK_S = 60.0
"""Assumed slack of a request without a deadline, in seconds."""

_FEW_GONE = 16
"""Maximum number of stale entries tolerated in a queue, because they retain the tokens of finished requests."""

SLO_LATE_S = 600.0
"""Assumed slack under `slo` for a request that can no longer meet its target, in seconds. It ranks behind all that can.
"""

LPM_WINDOW, FAIR_WINDOW = 64, 16
"""How many of the oldest requests are ranked by their cached tokens: `lpm` in the whole queue, `fair` per tenant."""

CachedTokens = Callable[[Request], int] | None
"""Returns a request's number of cached tokens; None if it does not matter."""
Place = tuple[float | str, ...]
"""Rank of a request among the first requests in several queues of a policy; smallest first."""


class WaitingQueue(ABC):
    """Requests in the order of a policy; each request at most once."""

    @abstractmethod
    def __len__(self) -> int:
        """Count the live requests in the queue."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Add a request, or put it back; the policy determines its place."""

    @abstractmethod
    def take(self, cached: CachedTokens) -> Request | None:
        """Take out the first request, or return None.

        Args:
            cached: returns how many of a request's tokens are cached on the worker that will run it; None if no request
                can start now.
        """

    def admitted(self, request: Request) -> None:
        """Record that a request from this queue, or from another queue of the policy, was admitted."""
        return

    @abstractmethod
    def extract(self, request: Request) -> None:
        """Take out a request from any place."""

    @abstractmethod
    def discard(self, request: Request) -> None:
        """Remove a request that has ended."""

    @abstractmethod
    def remove(self, requests: AbstractSet[Request]) -> None:
        """Remove those of `requests` that are in this queue, because they now wait in another queue."""

    @abstractmethod
    def first_ones(self, most: int) -> list[Request]:
        """Return at most `most` requests in the current order without taking them; the cost depends only on `most`.

        The order may change until they are taken, if it depends on service or on the worker.
        """


class Policy(ABC):
    """An order of admission, with the state that it needs."""

    accounts_service = False
    """Whether `served` must be called with every token before `take`."""
    has_keys = False
    """Whether the order of all requests, waiting or running, equals the order of their ranks."""
    is_by_turns = False
    """Whether groups of requests take turns. A short request is then served only in its group's turn."""

    @abstractmethod
    def make_queue(self) -> WaitingQueue:
        """Make an empty queue."""

    @abstractmethod
    def rank(self, request: Request) -> float:
        """Return the urgency of a request; smaller is more urgent. The largest is preempted when memory runs out."""

    @abstractmethod
    def place(self, request: Request) -> Place:
        """Return the request's place among the first requests of this policy's queues."""

    def late_s(self, request: Request) -> float:
        """Return the minimum time by which a request that misses its target now is moved back, s."""
        return EDF_SLACK_S

    def enter(self, account: Account) -> None:
        """Count one more waiting request of the account."""
        return

    def leave(self, account: Account) -> None:
        """Subtract one waiting request of the account."""
        return

    def served(self, account: Account, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count tokens that were computed for the account."""
        return


class KeyedPolicy(Policy):
    """Orders requests by one key each. Ties are broken by order of arrival."""

    has_keys = True

    def __init__(self, key: Callable[[Request], float], late_s: float = EDF_SLACK_S) -> None:
        self._key = key
        self._late_s = late_s

    def late_s(self, request: Request) -> float:
        return self._late_s

    def make_queue(self) -> WaitingQueue:
        return KeyedQueue(self._key)

    def rank(self, request: Request) -> float:
        return self._key(request)

    def place(self, request: Request) -> Place:
        return (self._key(request), request.sequence)


class KeyedQueue(WaitingQueue):
    """A heap ordered by one key per request. Ties are broken by order of arrival."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        """Entries by key. An entry is stale if its request has left the queue or has another key now."""
        self._keys: dict[Request, float] = {}
        """The requests in the queue, with the key of each."""
        self._extracted: dict[Request, float] = {}
        """Requests taken out of turn, with the key of their stale heap entry."""

    def __len__(self) -> int:
        return len(self._keys)

    def push(self, request: Request) -> None:
        key = self._keys[request] = self._key(request)
        if not self._extracted or self._extracted.pop(request, None) != key:
            heapq.heappush(self._heap, (key, request.sequence, request))

    def take(self, cached: CachedTokens) -> Request | None:
        return self.pop()

    def first(self) -> Request | None:
        """Return the first request, or None."""
        while self._heap:
            key, _, request = self._heap[0]
            if self._keys.get(request) == key:
                return request
            heapq.heappop(self._heap)
            if self._extracted.get(request) == key:
                del self._extracted[request]
        return None

    def pop(self) -> Request | None:
        """Take out the first request, or return None."""
        request = self.first()
        if request is not None:
            heapq.heappop(self._heap)
            del self._keys[request]
        return request

    def extract(self, request: Request) -> None:
        self._extracted[request] = self._keys.pop(request)
        self._compact()

    def discard(self, request: Request) -> None:
        del self._keys[request]
        self._compact()

    def remove(self, requests: AbstractSet[Request]) -> None:
        self._keys = {request: key for request, key in self._keys.items() if request not in requests}
        self._rebuild()

    def _compact(self) -> None:
        """Drop the void entries if there are many."""
        num_void = len(self._heap) - len(self._keys)
        if not self._keys or (num_void > _FEW_GONE and num_void * 2 > len(self._heap)):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(key, request.sequence, request) for request, key in self._keys.items()]
        heapq.heapify(self._heap)
        self._extracted.clear()

    def first_ones(self, most: int) -> list[Request]:
        # The next entry is always a child of an earlier entry.
        found: dict[Request, None] = {}
        reached = [(self._heap[0], 0)] if self._heap else []
        while reached and len(found) < most:
            (key, _, request), place = heapq.heappop(reached)
            if self._keys.get(request) == key:
                found[request] = None
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap):
                    heapq.heappush(reached, (self._heap[child], child))
        return list(found)


class FairPolicy(Policy):
    """Orders groups: the group with the least service per weight is next.

    Service is counted in tokens as they are computed: `INPUT_WEIGHT` per prompt token and `OUTPUT_WEIGHT` per generated
    token. Between two continuously backlogged groups, service per weight differs by at most 2 x max(INPUT_WEIGHT x
    longest prompt, OUTPUT_WEIGHT x tokens that fit into the KV cache). This is theorem 4.4 of Sheng et al.
    """

    accounts_service = True
    is_by_turns = True
    INPUT_WEIGHT = 1.0
    OUTPUT_WEIGHT = 2.0

    def __init__(
        self, group_of: Callable[[Account], str], weights: Mapping[str, float], policies: Mapping[str, Policy]
    ) -> None:
        """Group accounts by `group_of`; `policies` order the requests in each group ("" for unlisted groups)."""
        self.ledger = ServiceLedger(weights)
        self.group_of = group_of
        self._policies = policies

    def within(self, group: str) -> Policy:
        """Return the policy for the requests in one group."""
        return self._policies.get(group) or self._policies[""]

    def make_queue(self) -> WaitingQueue:
        return FairQueue(self)

    def rank(self, request: Request) -> float:
        return self.within(self.group_of(request.account)).rank(request)

    def late_s(self, request: Request) -> float:
        return self.within(self.group_of(request.account)).late_s(request)

    def place(self, request: Request) -> Place:
        group = self.group_of(request.account)
        return (self.ledger.service(group), group, *self.within(group).place(request))

    def enter(self, account: Account) -> None:
        group = self.group_of(account)
        self.ledger.enter(group)
        self.within(group).enter(account)

    def leave(self, account: Account) -> None:
        group = self.group_of(account)
        self.ledger.leave(group)
        self.within(group).leave(account)

    def served(self, account: Account, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        group = self.group_of(account)
        self.ledger.serve(group, self.INPUT_WEIGHT * prompt_tokens + self.OUTPUT_WEIGHT * output_tokens)
        self.within(group).served(account, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


class FairQueue(WaitingQueue):
    """One queue per group; the least served group with requests here is next."""

    def __init__(self, policy: FairPolicy) -> None:
        self._policy = policy
        self._queues: dict[str, WaitingQueue] = {}
        """By group, for the groups in the heap; some queues are empty by now."""
        self._order: list[tuple[float, str]] = []
        """A heap of (service, group). Service only grows, so an entry is a lower bound."""
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        group = self._policy.group_of(request.account)
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = self._policy.within(group).make_queue()
            heapq.heappush(self._order, (self._policy.ledger.service(group), group))
        queue.push(request)
        self._num_requests += 1

    def take(self, cached: CachedTokens) -> Request | None:
        while self._order:
            bound, group = self._order[0]
            service = self._policy.ledger.service(group)
            queue = self._queues[group]
            if not len(queue):
                heapq.heappop(self._order)
                del self._queues[group]
            elif bound != service:
                heapq.heapreplace(self._order, (service, group))
            else:
                request = queue.take(cached)
                assert request is not None
                self._num_requests -= 1
                return request
        return None

    def admitted(self, request: Request) -> None:
        queue = self._queues.get(self._policy.group_of(request.account))
        if queue is not None:
            queue.admitted(request)

    def extract(self, request: Request) -> None:
        self._num_requests -= 1
        self._queues[self._policy.group_of(request.account)].extract(request)

    def discard(self, request: Request) -> None:
        self._num_requests -= 1
        self._queues[self._policy.group_of(request.account)].discard(request)
        # `take` drops an empty group in its turn. Without a worker, `take` is not called, so drop such groups here.
        if len(self._queues) > 64 + 2 * self._num_requests:
            self._drop_empty()

    def remove(self, requests: AbstractSet[Request]) -> None:
        for queue in self._queues.values():
            queue.remove(requests)
        self._num_requests = sum(map(len, self._queues.values()))
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._queues = {group: queue for group, queue in self._queues.items() if len(queue)}
        self._order = [(self._policy.ledger.service(group), group) for group in self._queues]
        heapq.heapify(self._order)

    def first_ones(self, most: int) -> list[Request]:
        least_served = heapq.nsmallest(
            most,
            (group for group, queue in self._queues.items() if len(queue)),
            key=lambda group: (self._policy.ledger.service(group), group),
        )
        found: list[Request] = []
        for group in least_served:
            found += self._queues[group].first_ones(most - len(found))
        return found


class LongestPrefixPolicy(Policy):
    """The oldest requests, ordered by cached tokens, most first; see `LongestPrefixQueue`."""

    def __init__(self, window: int) -> None:
        """Rank the `window` oldest requests of a queue."""
        self._window = window

    def make_queue(self) -> WaitingQueue:
        return LongestPrefixQueue(self._window)

    def rank(self, request: Request) -> float:
        return fcfs_key(request)

    def place(self, request: Request) -> Place:
        return (request.sequence,)


class LongestPrefixQueue(WaitingQueue):
    """A queue in which the next request is the one with the most cached tokens within a window of the oldest requests.

    After `MAX_PASSED` admissions of other requests, a request is next regardless of cached tokens. It therefore waits
    for at most MAX_PASSED admissions more than under first come, first served.
    """

    MAX_PASSED = 32

    def __init__(self, window: int) -> None:
        """Create a queue that ranks the `window` oldest requests."""
        self._num_ranked = window
        self._rest = KeyedQueue(fcfs_key)
        self._window: list[Request] = []
        """The oldest requests, in order of arrival."""

    def __len__(self) -> int:
        return len(self._rest) + len(self._window)

    def push(self, request: Request) -> None:
        if self._window and request.sequence < self._window[-1].sequence:
            bisect.insort(self._window, request, key=lambda each: each.sequence)
            if len(self._window) > self._num_ranked:
                self._rest.push(self._window.pop())
        else:
            self._rest.push(request)

    def take(self, cached: CachedTokens) -> Request | None:
        while len(self._window) < self._num_ranked and (following := self._rest.take(cached)) is not None:
            self._window.append(following)
        if not self._window:
            return None
        if cached is None or self._window[0].wait.passed_over >= self.MAX_PASSED:
            chosen = 0
        else:
            num_cached = [cached(request) for request in self._window]
            chosen = num_cached.index(max(num_cached))
        return self._window.pop(chosen)

    def admitted(self, request: Request) -> None:
        for older in self._window:
            if older.sequence > request.sequence:
                return
            older.wait.passed_over += 1

    def extract(self, request: Request) -> None:
        if request in self._window:
            self._window.remove(request)
        else:
            self._rest.extract(request)

    def discard(self, request: Request) -> None:
        if request in self._window:
            self._window.remove(request)
        else:
            self._rest.discard(request)

    def remove(self, requests: AbstractSet[Request]) -> None:
        self._window = [request for request in self._window if request not in requests]
        self._rest.remove(requests)

    def first_ones(self, most: int) -> list[Request]:
        return [*self._window[:most], *self._rest.first_ones(most - len(self._window))]


def fcfs_key(request: Request) -> float:
    """Return the key for first come, first served; a preempted request keeps its place."""
    return request.arrival


def priority_key(request: Request) -> float:
    """Return the sort key of the policy `priority`: higher priority first, and priority rises with the waiting time."""
    return request.arrival - request.spec.priority * AGEING_S


def sjf_key(request: Request) -> float:
    """Return the key for shortest job first with ageing, without tokens that are already generated."""
    return request.arrival + SJF_S_PER_TOKEN * max(0.0, request.wait.forecast_tokens - request.num_generated)


def late_rank(request: Request, now: float, late_s: float = EDF_SLACK_S) -> float:
    """Return the key under `edf` or `slo` for a request that misses its target now."""
    assert request.wait.latest_start is not None
    return now + max(late_s, request.wait.latest_start - request.arrival)


def edf_key(request: Request) -> float:
    """Return the key of least laxity first: the latest start that still meets the deadline."""
    if request.late_rank is not None:
        return request.late_rank
    if request.wait.latest_start is None:
        return request.arrival + EDF_SLACK_S
    return request.wait.latest_start


def slo_key(request: Request) -> float:
    """Return the key for least slack first; a request with tokens continues before others start."""
    if request.late_rank is None and request.wait.latest_start is None and request.num_generated:
        return request.arrival
    return edf_key(request)


@dataclass(frozen=True, slots=True)
class _KnownClass:
    """Returns the class of an account, or "" if it is not configured."""

    names: frozenset[str]

    def __call__(self, account: Account) -> str:
        return account.request_class if account.request_class in self.names else ""


def _tenant(account: Account) -> str:
    return account.tenant


_KEYS = {"balanced": fcfs_key, "fcfs": fcfs_key, "priority": priority_key, "sjf": sjf_key, "edf": edf_key}


def make_policy(name: str, tenant_weights: Mapping[str, float], classes: Mapping[str, RequestClass]) -> Policy:
    """Create a policy by name, or a policy with request classes that have their own policies.

    Args:
        name: one of `POLICIES`; with classes, the policy for requests without a known class.
        tenant_weights: tenant weights under `fair`; 1 for other tenants.
        classes: the request classes by name.
    """
    if classes:
        weights = {name: each.weight for name, each in classes.items()}
        policies = {"": make_policy(name, tenant_weights, {})}
        policies |= {name: make_policy(each.policy, tenant_weights, {}) for name, each in classes.items()}
        return FairPolicy(_KnownClass(frozenset(classes)), weights, policies)
    if name == "fair":
        return FairPolicy(_tenant, tenant_weights, {"": LongestPrefixPolicy(FAIR_WINDOW)})
    if name == "lpm":
        return LongestPrefixPolicy(LPM_WINDOW)
    if name == "slo":
        return KeyedPolicy(slo_key, SLO_LATE_S)
    return KeyedPolicy(_KEYS[name])
