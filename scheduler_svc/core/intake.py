"""Whether a new request may wait, and when to come again for one that may not.

A request is turned away when it is none, when the queue or its tenant's share of it is full, and when it cannot be
complete by its deadline, as far as can be foreseen. The time to come again is that which those before it will take:
requests that wait, times the smoothed time between two admissions.
"""

from typing import NamedTuple

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.records import EndReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenants

_SMOOTHING = 0.05
_CAUTION = 1.25
"""By how much longer than foreseen a wait may be."""
_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0


class TurnedAway(NamedTuple):
    """Why a request ends as it arrives."""

    reason: EndReason
    message: str = ""
    retry_ms: int = 0
    """When to try again; 0: that would be in vain."""


class Intake:
    """What one core takes in."""

    def __init__(self, config: CoreConfig, tenants: Tenants, forecast: Forecast) -> None:
        self._config = config
        self._tenants = tenants
        self._forecast = forecast
        self._admission_gap: float | None = None
        """Smoothed time between two first admissions, the later of which was waiting for the earlier one."""
        self._last_admission = 0.0

    def admitted(self, request: Request, now: float) -> None:
        """A worker has taken a request for the first time."""
        if request.queued_since <= self._last_admission:
            gap = now - self._last_admission
            known = self._admission_gap
            self._admission_gap = gap if known is None else known + _SMOOTHING * (gap - known)
        self._last_admission = now

    def turns_away(self, request: Request, num_waiting: int, num_tokens: int, now: float) -> TurnedAway | None:
        """Why a new request cannot wait, or None.

        Args:
            request: it counts nowhere yet.
            num_waiting: requests that wait.
            num_tokens: their tokens.
            now: the time.
        """
        if not 0 < request.num_prompt_tokens <= len(request.tokens):
            return TurnedAway(EndReason.INVALID, "the prompt is empty or longer than the tokens given")
        if len(request.tokens) >= request.limit:
            return TurnedAway(EndReason.LENGTH)  # submitted again when nothing was left to do
        if not self._tenants.may_queue(request):
            message = f"tenant {request.tenant!r} has as many requests waiting as it may"
            return TurnedAway(EndReason.QUEUE_FULL, message, self._retry_ms(num_waiting))
        if self._queue_is_full(request, num_waiting, num_tokens):
            message = f"{num_waiting} requests with {num_tokens} tokens are waiting already"
            return TurnedAway(EndReason.QUEUE_FULL, message, self._retry_ms(num_waiting))
        if self._misses_its_deadline(request, num_waiting, now):
            message = f"the deadline cannot be met: {num_waiting} requests wait; allow more time or try again later"
            return TurnedAway(EndReason.DEADLINE, message, self._retry_ms(num_waiting))
        return None

    def _queue_is_full(self, request: Request, num_waiting: int, num_tokens: int) -> bool:
        config = self._config
        return num_waiting >= config.max_queued_requests or (
            num_waiting > 0 and num_tokens + len(request.tokens) > config.max_queued_tokens
        )

    def _expected_wait(self, num_waiting: int) -> float:
        """How long a request that arrived now would wait, first come, first served."""
        return num_waiting * (self._admission_gap or 0.0)

    def _retry_ms(self, num_waiting: int) -> int:
        return int(1000 * min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, self._expected_wait(num_waiting))))

    def _misses_its_deadline(self, request: Request, num_waiting: int, now: float) -> bool:
        """Whether a new request cannot be complete in time, as far as can be foreseen.

        Who finds nobody waiting is let in all the same: what was measured may be of another day, and only what runs
        measures anew.
        """
        if request.deadline is None or request.num_generated or not num_waiting:
            return False
        must_start = self._forecast.must_start(request)
        assert must_start is not None
        first_come = self._config.policy_of(request.request_class) == "fcfs"
        return now + (_CAUTION * self._expected_wait(num_waiting) if first_come else 0.0) > must_start
