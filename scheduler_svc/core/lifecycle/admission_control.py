"""AdmissionControl: whether a new request may wait, and when to retry one that may not.

A request is refused in these cases:

* It has no prompt.
* The queue is full, or its tenant's share of it.
* By forecast, it cannot be complete by its deadline.

The retry time is the expected time that the requests before it take: the number of competing requests, times the
smoothed time between two admissions. Requests that are held for their tenant's quota do not count, so the backlog of a
tenant at its limit changes nothing for other tenants.

A request that an earlier core accepted is not refused for lack of room or by a forecast. The queue may then exceed its
limits by the requests that front ends hold. New requests are refused until it is within its limits again.
"""

from typing import NamedTuple

from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request

_SMOOTHING = 0.05
_CAUTION = 1.25
"""Safety factor on the forecast wait."""
_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0


class TurnedAway(NamedTuple):
    """Reason why a request ends on arrival."""

    reason: EndReason
    message: str = ""
    retry_ms: int = 0
    """Time after which to try again, ms; 0: a retry would fail as well."""


class AdmissionControl:
    """Decision of one core which requests it takes in."""

    def __init__(self, config: CoreConfig, tenants: Tenants, forecast: Forecast) -> None:
        self._config = config
        self._tenants = tenants
        self._forecast = forecast
        self._admission_gap: float | None = None
        """Smoothed time between two first admissions, s, where the later request waited for the earlier one."""
        self._last_admission = 0.0

    def admitted(self, request: Request, now: float) -> None:
        """Record the first admission of a request."""
        if max(request.wait.since, request.wait.released) <= self._last_admission:
            gap = now - self._last_admission
            known = self._admission_gap
            self._admission_gap = gap if known is None else known + _SMOOTHING * (gap - known)
        self._last_admission = now

    def refusal(
        self, request: Request, *, num_waiting: int, num_competing: int, num_tokens: int, now: float
    ) -> TurnedAway | None:
        """Return why a new request cannot wait, or None.

        Args:
            request: the new request, which is not counted anywhere yet.
            num_waiting: number of waiting requests.
            num_competing: number of those that may start as soon as there is room.
            num_tokens: tokens of the waiting requests.
            now: the time, s.
        """
        if request.accepted:
            return None
        if not self._tenants.may_queue(request):
            message = f"tenant {request.spec.tenant!r}: as many requests wait as its limit allows; try again later"
            return TurnedAway(EndReason.TENANT_LIMIT, message, self._retry_ms(num_competing))
        if self._queue_is_full(request, num_waiting, num_tokens):
            message = (
                f"the waiting queue is full: {num_waiting} requests with {num_tokens} tokens wait; try again later"
            )
            return TurnedAway(EndReason.QUEUE_FULL, message, self._retry_ms(num_competing))
        if self._misses_its_deadline(request, num_competing, now):
            message = f"the deadline cannot be met: {num_competing} requests wait; allow more time or try again later"
            return TurnedAway(EndReason.DEADLINE, message, self._retry_ms(num_competing))
        return None

    def _queue_is_full(self, request: Request, num_waiting: int, num_tokens: int) -> bool:
        config = self._config
        return num_waiting >= config.max_queued_requests or (
            num_waiting > 0 and num_tokens + len(request.tokens) > config.max_queued_tokens
        )

    def _expected_wait(self, num_competing: int) -> float:
        """Return the expected wait of a request that arrives now, s, under first come, first served."""
        return num_competing * (self._admission_gap or 0.0)

    def _retry_ms(self, num_competing: int) -> int:
        return int(1000 * min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, self._expected_wait(num_competing))))

    def _misses_its_deadline(self, request: Request, num_competing: int, now: float) -> bool:
        """Return whether a new request cannot be complete in time, by forecast.

        A request without competing ones is always accepted. The measurements may be out of date, and only running
        requests produce new ones.
        """
        if request.deadline is None or request.num_generated or not num_competing:
            return False
        must_start = self._forecast.must_start(request)
        assert must_start is not None
        first_come = self._config.policy_of(request.spec.request_class) == "fcfs"
        return now + (_CAUTION * self._expected_wait(num_competing) if first_come else 0.0) > must_start
