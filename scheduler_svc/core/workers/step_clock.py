"""Step clock: how long a worker's steps take, when its next plan is due, and when to give it up.

Durations are learned per size class, a power of two of the budget tokens that a step takes. Each class has a smoothed
mean and mean deviation, in the way TCP estimates round trips (Jacobson, SIGCOMM 1988), and the largest of its recent
durations.

A plan goes out *just in time*: late enough that arrivals and cancels catch the next step, early enough that the worker
never waits.

The right margin depends on the load of scheduler, link and machine, which cannot be predicted. So it is learned from
failures. It grows by the time that the worker had to wait, and shrinks slowly otherwise.
"""

from collections import deque
from dataclasses import dataclass, field

LEAD_S = 0.002
"""Minimum margin, s: time for planning, encoding and the link."""
TOLERATED_IDLE = 0.02
"""Share of a step's time for which a device may idle before the step: that happens even if a plan is waiting."""
_MARGIN_DECAY = 0.01
"""Share of the learned part of the margin that every step removes."""
EARLY_S = 0.001
"""Time by which a plan may go out early, s: so plans of many workers share one turn of the loop."""
MIN_DEADLINE_S = 1.0
DEADLINE_FACTOR = 8.0
MIN_SAMPLES = 20
"""Steps of a size class to measure before its deadline is derived from them."""
_RECENT = 100


@dataclass(slots=True)
class _Estimate:
    mean: float
    deviation: float
    count: int = 0
    peaks: deque[tuple[int, float]] = field(default_factory=deque)
    """(number, duration in s) of recent steps that no later one exceeded; the first is the longest."""

    def add(self, duration: float) -> None:
        self.count += 1
        while self.peaks and self.peaks[-1][1] <= duration:
            self.peaks.pop()
        self.peaks.append((self.count, duration))
        if self.peaks[0][0] <= self.count - _RECENT:
            self.peaks.popleft()


class StepClock:
    """Learned durations of steps; all times in seconds."""

    def __init__(self, deadline_ceiling: float) -> None:
        self._deadline_ceiling = deadline_ceiling
        self._estimates: dict[int, _Estimate] = {}
        self._margin = LEAD_S

    def observe(self, cost: int, duration: float) -> None:
        """Record the duration of one step."""
        size = cost.bit_length()
        estimate = self._estimates.get(size)
        if estimate is None:
            estimate = self._estimates[size] = _Estimate(mean=duration, deviation=duration / 2)
        else:
            estimate.deviation += 0.25 * (abs(duration - estimate.mean) - estimate.deviation)
            estimate.mean += 0.125 * (duration - estimate.mean)
        estimate.add(duration)

    def idled(self, cost: int, idle: float) -> None:
        """Record the idle time of the worker before a step of this cost that could have been planned earlier."""
        estimate = self._estimates.get(cost.bit_length())
        self._margin += _MARGIN_DECAY * (LEAD_S - self._margin)
        if estimate is not None and idle > TOLERATED_IDLE * estimate.mean:
            # A margin as long as the step sends the next plan at once; a longer one would only take longer to shrink.
            self._margin = max(LEAD_S, min(self._margin + idle, estimate.mean))

    def lead(self, cost: int) -> float:
        """Return how long after the start of a step of this cost to send the next plan, s.

        0 before the first measurement.
        """
        estimate = self._estimates.get(cost.bit_length())
        if estimate is None:
            return 0.0
        return max(0.0, estimate.mean - 4 * estimate.deviation - self._margin)

    def deadline(self, cost: int) -> float:
        """Return the time that a step of this cost may take before its worker counts as hung."""
        estimate = self._estimates.get(cost.bit_length())
        if estimate is None or estimate.count < MIN_SAMPLES:
            return self._deadline_ceiling
        # With at most 100 samples, the 99th percentile is the largest.
        return min(self._deadline_ceiling, max(MIN_DEADLINE_S, DEADLINE_FACTOR * estimate.peaks[0][1]))
