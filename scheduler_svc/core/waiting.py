"""Waiting queues: which request is next. One small class per policy.

A queue hands out its best request with `take`; a planner that cannot place it hands it back with `give_back`. Requests
that end while they wait are discarded lazily; when half a heap is such leftovers it is rebuilt, so that memory follows
the number of live requests.

Most policies are a *key*: a number per request, fixed when it is queued, smallest first. Ageing needs no clock then: an
order by "arrival minus a bonus" is the order by "bonus plus time waited" at every moment. So nothing starves: a request
can be overtaken only by requests that arrive within its key's advantage.

| policy | key | overtaken only by requests that arrive at most |
|---|---|---|
| fcfs | order of arrival | 0 s later |
| priority | arrival - priority x `AGEING_S` | (their priority - its own) x `AGEING_S` later |
| sjf | arrival + `SJF_S_PER_TOKEN` x expected tokens | `SJF_S_PER_TOKEN` x its expected tokens later |
| edf | latest start that still meets the deadline | its slack later; without a deadline `EDF_SLACK_S` later |

`fair` (virtual token counter, Sheng et al., OSDI 2024) serves the tenant that was served least; `lpm` (longest prefix
match, SGLang) ranks a window of the oldest requests by what is cached of them.
"""

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from scheduler_svc.core.errors import InvalidLimitsError
from scheduler_svc.core.request import Request, RequestState

AGEING_S = 10.0
"""Waiting so long weighs as much as one level of priority."""
SJF_S_PER_TOKEN = 0.05
"""One expected output token weighs as much as having arrived so much later."""
EDF_SLACK_S = 60.0
"""A request without a deadline counts as one that must start so long after its arrival."""

POLICIES = ("fcfs", "priority", "sjf", "edf", "fair", "lpm")
PREEMPTIVE_POLICIES = ("priority", "edf")
"""Policies under which a waiting request may rank so far ahead of a running one that it pauses it."""

CachedTokens = Callable[[Request], int]


class WaitingQueue(ABC):
    """Requests in state WAITING, each at most once."""

    accounts_service = False
    """Whether `served` must be told of every token before `take`."""

    @abstractmethod
    def __len__(self) -> int:
        """Live requests in the queue."""

    @abstractmethod
    def push(self, request: Request) -> None:
        """Adds a request."""

    @abstractmethod
    def take(self, cached: CachedTokens) -> Request | None:
        """Takes the next request out, or None.

        Args:
            cached: how many of a request's tokens the worker that asks has in its prefix cache.
        """

    @abstractmethod
    def discard(self, request: Request) -> None:
        """A request in the queue has finished."""

    @abstractmethod
    def requests(self) -> list[Request]:
        """All live requests, in no particular order."""

    def rank(self, request: Request) -> float:
        """How urgent a request is, smaller is more; decides who gives way when memory runs out."""
        return fcfs_key(request)

    def give_back(self, request: Request) -> None:
        """Puts back what `take` returned; it keeps its place."""
        self.push(request)

    def served(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens were computed for a request; only policies that account for service care."""
        return


class KeyedQueue(WaitingQueue):
    """A heap ordered by a key per request; ties by order of arrival."""

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def rank(self, request: Request) -> float:
        return self._key(request)

    def push(self, request: Request) -> None:
        request.queued = True
        heapq.heappush(self._heap, (self._key(request), request.sequence, request))

    def take(self, cached: CachedTokens) -> Request | None:
        while self._heap:
            _, _, request = heapq.heappop(self._heap)
            if request.state is not RequestState.FINISHED:
                request.queued = False
                return request
            self._num_gone -= 1
        return None

    def discard(self, request: Request) -> None:
        request.queued = False
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state is not RequestState.FINISHED]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def requests(self) -> list[Request]:
        return [request for _, _, request in self._heap if request.state is not RequestState.FINISHED]


class FairQueue(WaitingQueue):
    """The tenant with the least service per weight goes next; within a tenant, first come, first served.

    Service is counted in tokens as they are computed: `INPUT_WEIGHT` for each of a prompt's, `OUTPUT_WEIGHT` for each
    generated one. A tenant that comes back is lifted to the least served tenant that waits, so that idleness is not
    saved up. Between two tenants that wait all the time, service per weight never differs by more than
    2 x max(INPUT_WEIGHT x longest prompt, OUTPUT_WEIGHT x tokens that fit into the KV cache) (Sheng et al., theorem
    4.4).
    """

    accounts_service = True
    INPUT_WEIGHT = 1.0
    OUTPUT_WEIGHT = 2.0

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, KeyedQueue] = {}
        self._service: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._tenants.values())

    def push(self, request: Request) -> None:
        queue = self._tenants.get(request.tenant)
        if queue is None:
            queue = self._tenants[request.tenant] = KeyedQueue(fcfs_key)
            least = min((self._service[name] for name in self._tenants if name != request.tenant), default=0.0)
            self._service[request.tenant] = max(self._service.get(request.tenant, 0.0), least)
        queue.push(request)

    def take(self, cached: CachedTokens) -> Request | None:
        while self._tenants:
            tenant = min(self._tenants, key=self._service.__getitem__)
            request = self._tenants[tenant].take(cached)
            if request is not None:
                return request
            del self._tenants[tenant]
        return None

    def discard(self, request: Request) -> None:
        self._tenants[request.tenant].discard(request)

    def requests(self) -> list[Request]:
        return [request for queue in self._tenants.values() for request in queue.requests()]

    def served(self, request: Request, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        cost = self.INPUT_WEIGHT * prompt_tokens + self.OUTPUT_WEIGHT * output_tokens
        weight = self._weights.get(request.tenant, 1.0)
        self._service[request.tenant] = self._service.get(request.tenant, 0.0) + cost / weight


class LongestPrefixQueue(WaitingQueue):
    """Of the `WINDOW` oldest requests, the one with the most cached tokens goes next.

    A request that was passed over `MAX_PASSED` times goes next whatever the others have cached, so a request waits for
    at most MAX_PASSED admissions more than under first come, first served.
    """

    WINDOW = 64
    MAX_PASSED = 32

    def __init__(self) -> None:
        self._rest = KeyedQueue(fcfs_key)
        self._window: list[Request] = []
        """The oldest requests, in order of arrival."""

    def __len__(self) -> int:
        return len(self._rest) + len(self._window)

    def push(self, request: Request) -> None:
        request.queued = True
        if self._window and request.sequence < self._window[-1].sequence:
            bisect.insort(self._window, request, key=fcfs_key)
            if len(self._window) > self.WINDOW:
                self._rest.push(self._window.pop())
        else:
            self._rest.push(request)

    def take(self, cached: CachedTokens) -> Request | None:
        while len(self._window) < self.WINDOW and (following := self._rest.take(cached)) is not None:
            following.queued = True
            self._window.append(following)
        if not self._window:
            return None
        if self._window[0].passed_over >= self.MAX_PASSED:
            chosen = 0
        else:
            chosen = max(range(len(self._window)), key=lambda index: (cached(self._window[index]), -index))
        for request in self._window[:chosen]:
            request.passed_over += 1
        request = self._window.pop(chosen)
        request.queued = False
        return request

    def discard(self, request: Request) -> None:
        request.queued = False
        if request in self._window:
            self._window.remove(request)
        else:
            self._rest.discard(request)

    def requests(self) -> list[Request]:
        return [*self._window, *self._rest.requests()]


def fcfs_key(request: Request) -> float:
    """First come, first served; a preempted request keeps its place."""
    return float(request.sequence)


def priority_key(request: Request) -> float:
    """Higher priority first, with ageing."""
    return request.arrival - request.priority * AGEING_S


def sjf_key(request: Request) -> float:
    """Fewest expected tokens first, with ageing; what is generated already no longer counts."""
    return request.arrival + SJF_S_PER_TOKEN * max(0.0, request.forecast_tokens - request.num_generated)


def edf_key(request: Request) -> float:
    """Least laxity first: by the latest start that still meets the deadline."""
    if request.latest_start is None:
        return request.arrival + EDF_SLACK_S
    return request.latest_start


def make_queue(policy: str, tenant_weights: dict[str, float]) -> WaitingQueue:
    """The queue of a policy by its configured name."""
    keys = {"fcfs": fcfs_key, "priority": priority_key, "sjf": sjf_key, "edf": edf_key}
    if policy in keys:
        return KeyedQueue(keys[policy])
    if policy == "fair":
        return FairQueue(tenant_weights)
    if policy == "lpm":
        return LongestPrefixQueue()
    raise InvalidLimitsError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
