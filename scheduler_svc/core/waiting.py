"""Waiting queues: which request is next. One small class per policy.

A queue hands out its best request with `take`; a planner that cannot place it hands it back with `give_back`. Requests
that end while they wait are discarded lazily; when half a heap is such leftovers it is rebuilt, so that memory follows
the number of live requests.

Most policies are a *key*: seconds per request, fixed when it is queued, smallest first; ties go by order of arrival.
Ageing needs no clock then: an order by "arrival minus a bonus" is one by "bonus plus time waited" at every moment. So
nothing starves: a request can be overtaken only by requests that arrive within its key's advantage.

| policy | key | overtaken only by requests that arrive at most |
|---|---|---|
| fcfs | order of arrival | 0 s later |
| priority | arrival - priority x `AGEING_S` | (their priority - its own) x `AGEING_S` later |
| sjf | arrival + `SJF_S_PER_TOKEN` x expected tokens | `SJF_S_PER_TOKEN` x its expected tokens later |
| edf | latest start that still meets the deadline | its slack later; without a deadline `EDF_SLACK_S` later |

`fair` (virtual token counter, Sheng et al., OSDI 2024) serves the tenant that was served least; `lpm` (longest prefix
match, SGLang) ranks a window of the oldest requests by what is cached of them. Where request classes are configured,
each class has a queue with its own policy, and the classes take turns as tenants do under `fair`.
"""

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from scheduler_svc.core.accounts import Account
from scheduler_svc.core.config import RequestClass
from scheduler_svc.core.request import Request, RequestState

AGEING_S = 10.0
"""Waiting so long weighs as much as one level of priority."""
SJF_S_PER_TOKEN = 0.05
"""One expected output token weighs as much as having arrived so much later."""
EDF_SLACK_S = 60.0
"""A request without a deadline counts as one that must start so long after its arrival."""

CachedTokens = Callable[[Request], int]


class WaitingQueue(ABC):
    """Requests in state WAITING, each at most once."""

    accounts_service = False
    """Whether `served` must be told of every token before `take`, or need not be called at all."""

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

    def served(self, account: Account, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens were computed for an account; only policies that account for service care."""
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
    """Groups of requests take turns: the one with the least service per weight goes next.

    Service is counted in tokens as they are computed: `INPUT_WEIGHT` for each of a prompt's, `OUTPUT_WEIGHT` for each
    generated one. A group that comes back is lifted to the least served group that waits, so that idleness is not saved
    up. Between two groups that wait all the time, service per weight never differs by more than
    2 x max(INPUT_WEIGHT x longest prompt, OUTPUT_WEIGHT x tokens that fit into the KV cache) (Sheng et al., theorem
    4.4).
    """

    accounts_service = True
    INPUT_WEIGHT = 1.0
    OUTPUT_WEIGHT = 2.0
    MAX_IDLE = 10_000
    """Groups without waiting requests whose service is remembered; beyond that the least served half is forgotten."""

    def __init__(
        self, group_of: Callable[[Account], str], weights: Mapping[str, float], make: Callable[[str], WaitingQueue]
    ) -> None:
        """Groups accounts by `group_of`; those of a group wait in the queue that `make` makes for its name."""
        self._group_of = group_of
        self._weights = weights
        self._make = make
        self._queues: dict[str, WaitingQueue] = {}
        self._service: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []
        """A heap of the groups that wait. Service only grows, so an entry is a lower bound of it."""
        self._waiting: set[str] = set()
        """The groups in it."""
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def push(self, request: Request) -> None:
        group = self._group_of(request.account)
        if group not in self._waiting:
            least = self._least_served()
            lifted = 0.0 if least is None else self._service[least]
            service = self._service[group] = max(self._service.get(group, 0.0), lifted)
            heapq.heappush(self._order, (service, group))
            self._waiting.add(group)
        self._num_requests += 1
        self._queue_of(group).push(request)

    def take(self, cached: CachedTokens) -> Request | None:
        while (group := self._least_served()) is not None:
            request = self._queues[group].take(cached)
            if request is not None:
                self._num_requests -= 1
                return request
            heapq.heappop(self._order)
            self._waiting.remove(group)
            self._forget_idle()
        return None

    def discard(self, request: Request) -> None:
        self._num_requests -= 1
        self._queues[self._group_of(request.account)].discard(request)
        # `take` finds a group that is empty when it is its turn, but while no worker is there nobody takes.
        if len(self._waiting) > 64 + 2 * self._num_requests:
            self._drop_empty()

    def requests(self) -> list[Request]:
        return [request for queue in self._queues.values() for request in queue.requests()]

    def rank(self, request: Request) -> float:
        return self._queue_of(self._group_of(request.account)).rank(request)

    def served(self, account: Account, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        group = self._group_of(account)
        cost = self.INPUT_WEIGHT * prompt_tokens + self.OUTPUT_WEIGHT * output_tokens
        self._service[group] = self._service.get(group, 0.0) + cost / self._weights.get(group, 1.0)
        self._queue_of(group).served(account, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def _queue_of(self, group: str) -> WaitingQueue:
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = self._make(group)
        return queue

    def _least_served(self) -> str | None:
        """The group at the top of the heap, once that is in order."""
        while self._order:
            bound, group = self._order[0]
            service = self._service[group]
            if bound == service:
                return group
            heapq.heapreplace(self._order, (service, group))
        return None

    def _drop_empty(self) -> None:
        """Groups whose requests have all been discarded wait no longer."""
        empty = {group for group in self._waiting if not len(self._queues[group])}
        for group in empty:
            self._queues[group].take(lambda _: 0)  # lets go of what was discarded
        self._waiting -= empty
        self._order = [entry for entry in self._order if entry[1] in self._waiting]
        heapq.heapify(self._order)
        self._forget_idle()

    def _forget_idle(self) -> None:
        # In order of arrival: which ones are forgotten must not depend on how strings are hashed.
        idle = [group for group in self._service if group not in self._waiting]
        if len(idle) > self.MAX_IDLE:
            for group in sorted(idle, key=self._service.__getitem__)[: len(idle) // 2]:
                del self._service[group]
                self._queues.pop(group, None)


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
            bisect.insort(self._window, request, key=lambda each: each.sequence)
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
    return request.arrival


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


_KEYS = {"fcfs": fcfs_key, "priority": priority_key, "sjf": sjf_key, "edf": edf_key}


def make_queue(policy: str, tenant_weights: Mapping[str, float], classes: Mapping[str, RequestClass]) -> WaitingQueue:
    """The queue of a policy by its name, or of several classes with policies of their own.

    Args:
        policy: one of `POLICIES`; with classes, that of requests of no known class.
        tenant_weights: shares of tenants under `fair`; 1 for those not named.
        classes: by name.
    """
    if classes:
        weights = {name: each.weight for name, each in classes.items()}
        policies = {name: each.policy for name, each in classes.items()}
        return FairQueue(
            lambda account: account.request_class if account.request_class in classes else "",
            weights,
            lambda name: make_queue(policies.get(name, policy), tenant_weights, {}),
        )
    if policy == "fair":
        return FairQueue(lambda account: account.tenant, tenant_weights, lambda _: KeyedQueue(fcfs_key))
    if policy == "lpm":
        return LongestPrefixQueue()
    return KeyedQueue(_KEYS[policy])
