"""Decides whether a new request may wait, and when to retry a request that may not.

A request is refused if one of these conditions holds:

* It has no prompt.
* As many requests of its tenant wait as the admission file allows.
* The queue is full.
* Its tenant has waiting requests, which together with this one would exceed the tenant's *share* of the queue.
* By forecast, it would miss its deadline with a probability of 95 percent.

A tenant's requests and tokens may be at most eight times the queue's free room. A single tenant can therefore use 8/9
of the queue. With several overloading tenants, the parts converge to equal sizes. The front end divides its resources
by the same rule (`services/access/shares.py`). A queue of up to eight requests is too small to divide.

The retry time is the forecast wait. Requests held for their tenant's quota do not count, so one tenant's backlog at its
limit does not affect other tenants.

A request accepted by an earlier core is not refused for lack of room or because of a forecast. After a restart, the
queue may therefore exceed its limits by the requests that front ends resubmit. New requests are refused until the queue
is within its limits again.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from scheduler_svc.core.interface.config import BY_ARRIVAL, CoreConfig
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0
_SHARE = 8
"""Maximum size of a tenant's part of the queue, relative to the free part."""


def largest_part(limit: int) -> int:
    """Return how much of an empty queue with this limit one tenant can use."""
    return min(limit, _SHARE * (limit + 1) // (_SHARE + 1))


class TurnedAway(NamedTuple):
    """Why a request ends on arrival."""

    reason: EndReason
    message: str = ""
    retry_ms: int = 0
    """Time after which to retry, ms; 0 if a retry would also fail."""


class AdmissionControl:
    """Decides which new requests a core accepts."""

    def __init__(self, config: CoreConfig, tenants: Tenants, predict: Callable[[Request, int, float], None]) -> None:
        """Create the admission control.

        `predict` forecasts the times of a request, given the number of competing requests and the time.
        """
        self._config = config
        self._tenants = tenants
        self._predict = predict
        self._retry_at = -math.inf
        """Arrival time for which `_retry_ms` was forecast."""
        self._retry_ms = 0

    def refusal(
        self, request: Request, *, num_waiting: int, num_competing: int, num_tokens: int, now: float
    ) -> TurnedAway | None:
        """Return why a new request cannot wait, or None.

        Args:
            request: the new request, which is not counted yet. It gets its forecasts unless there is no room.
            num_waiting: number of waiting requests.
            num_competing: number of those requests that may start as soon as there is room.
            num_tokens: tokens of the waiting requests.
            now: the time, s.
        """
        full = None if request.accepted else self._lack_of_room(request, num_waiting, num_tokens)
        if full is not None:
            return full._replace(retry_ms=self._forecast_retry_ms(request, num_competing, now))
        self._predict(request, num_competing, now)
        if not request.accepted and self._misses_its_deadline(request, num_competing, now):
            waiting = "1 request waits" if num_competing == 1 else f"{num_competing} requests wait"
            message = f"the deadline cannot be met: {waiting}; allow more time or try again later"
            return TurnedAway(EndReason.DEADLINE, message, _retry_ms(request))
        return None

    def _forecast_retry_ms(self, request: Request, num_competing: int, now: float) -> int:
        """Return the time after which to retry a request for which there is no room, ms.

        All requests that arrive at the same time share one forecast. Computing it is most of the cost of a refusal, and
        a front end may submit hundreds of such requests in one message.
        """
        if self._retry_at != now:
            self._predict(request, num_competing, now)
            self._retry_at, self._retry_ms = now, _retry_ms(request)
        return self._retry_ms

    def _lack_of_room(self, request: Request, num_waiting: int, num_tokens: int) -> TurnedAway | None:
        tenant = request.spec.tenant
        if not self._tenants.may_queue(request):
            message = f"tenant {tenant!r}: as many requests wait as its limit allows; try again later"
            return TurnedAway(EndReason.TENANT_LIMIT, message)
        if self._queue_is_full(request, num_waiting, num_tokens):
            message = (
                f"the waiting queue is full: {num_waiting} requests with {num_tokens} tokens wait; try again later"
            )
            return TurnedAway(EndReason.QUEUE_FULL, message)
        if self._exceeds_its_share(request, num_waiting, num_tokens):
            queued, tokens = self._tenants.num_queued(tenant)
            message = (
                f"tenant {tenant!r} has its share of the waiting queue: {queued} requests with {tokens} tokens wait; "
                f"of {self._config.max_queued_requests} requests and {self._config.max_queued_tokens} tokens, the rest "
                "is for other tenants; try again later"
            )
            return TurnedAway(EndReason.QUEUE_FULL, message)
        return None

    def _queue_is_full(self, request: Request, num_waiting: int, num_tokens: int) -> bool:
        config = self._config
        return num_waiting >= config.max_queued_requests or (
            num_waiting > 0 and num_tokens + len(request.tokens) > config.max_queued_tokens
        )

    def _exceeds_its_share(self, request: Request, num_waiting: int, num_tokens: int) -> bool:
        """Return whether waiting requests of the tenant, with this one, would exceed the tenant's share."""
        num_queued, queued_tokens = self._tenants.num_queued(request.spec.tenant)
        if not num_queued:
            return False
        more, config = len(request.tokens), self._config
        room, tokens_left = config.max_queued_requests - num_waiting, config.max_queued_tokens - num_tokens - more
        return num_queued + 1 > _SHARE * room or queued_tokens + more > _SHARE * (tokens_left + 1)

    def _misses_its_deadline(self, request: Request, num_competing: int, now: float) -> bool:
        """Return whether a new request would not be complete in time, with a probability of 95 percent.

        A request without competing requests is always accepted, because the measurements may be outdated and only
        running requests update them. If the policy does not admit requests in order of arrival, the wait is ignored.
        """
        if request.deadline is None or request.num_generated or not num_competing:
            return False
        if self._config.policy_of(request.spec.request_class) not in BY_ARRIVAL:
            return request.wait.must_start is not None and now > request.wait.must_start
        prediction = request.prediction
        if prediction is None:
            return False
        return now + (prediction.end or prediction.first_token).surely > request.deadline


def _retry_ms(request: Request) -> int:
    """Return the forecast median time until such a request starts, ms."""
    wait_s = request.prediction.wait.median if request.prediction is not None else 0.0
    return int(1000 * min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, wait_s)))
