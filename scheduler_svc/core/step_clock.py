"""How long a worker's steps take: when the next plan is due, and when to give the worker up.

Durations are learned per size class (power of two of what a step takes of the token budget) as a smoothed mean and mean
deviation, in the way TCP estimates round trips (Jacobson, SIGCOMM 1988), together with the largest of the recent ones.

A plan goes out *just in time*: late enough that arrivals and cancels catch the next step, early enough that the worker
never waits.

How early that is depends on what else scheduler, link and machine have to do, which nobody can foresee. So the margin
is learned from its failures: it grows by as long as the worker says that it had to wait, and shrinks slowly otherwise.
"""

from collections import deque
from dataclasses import dataclass, field

LEAD_S = 0.002
"""Time for planning, encoding and the link, before any deviation: the least margin."""
TOLERATED_IDLE = 0.02
"""Share of a step's time that a device may idle before it: it does so between any two steps, plan in hand or not."""
_MARGIN_DECAY = 0.01
"""By what share of itself the learned part of the margin shrinks with every step."""
EARLY_S = 0.001
"""A plan may go out so much before it is due: many workers' plans share a turn of the loop instead of one each."""
MIN_DEADLINE_S = 1.0
DEADLINE_FACTOR = 8.0
MIN_SAMPLES = 20
"""Steps of a size class to see before its deadline is derived from them."""
_RECENT = 100


@dataclass(slots=True)
class _Estimate:
    mean: float
    deviation: float
    count: int = 0
    peaks: deque[tuple[int, float]] = field(default_factory=deque)
    """(number, duration) of those of the recent steps that no later one outlasted: the first is the longest."""

    def add(self, duration: float) -> None:
        self.count += 1
        while self.peaks and self.peaks[-1][1] <= duration:
            self.peaks.pop()
        self.peaks.append((self.count, duration))
        if self.peaks[0][0] <= self.count - _RECENT:
            self.peaks.popleft()


class StepClock:
    """Learns from measured steps; all times in seconds."""

    def __init__(self, deadline_ceiling: float) -> None:
        self._deadline_ceiling = deadline_ceiling
        self._estimates: dict[int, _Estimate] = {}
        self._margin = LEAD_S

    def observe(self, cost: int, duration: float) -> None:
        """Takes in one measured step."""
        size = cost.bit_length()
        estimate = self._estimates.get(size)
        if estimate is None:
            estimate = self._estimates[size] = _Estimate(mean=duration, deviation=duration / 2)
        else:
            estimate.deviation += 0.25 * (abs(duration - estimate.mean) - estimate.deviation)
            estimate.mean += 0.125 * (duration - estimate.mean)
        estimate.add(duration)

    def idled(self, cost: int, idle: float) -> None:
        """The worker had nothing to do for so long before a step of this size that could have been planned earlier."""
        estimate = self._estimates.get(cost.bit_length())
        self._margin += _MARGIN_DECAY * (LEAD_S - self._margin)
        if estimate is not None and idle > TOLERATED_IDLE * estimate.mean:
            # A margin as long as the step sends its successor at once; more would only take longer to shrink.
            self._margin = max(LEAD_S, min(self._margin + idle, estimate.mean))

    def lead(self, cost: int) -> float:
        """How long after its start a step of this size wants its successor sent; at once while nothing is known."""
        estimate = self._estimates.get(cost.bit_length())
        if estimate is None:
            return 0.0
        return max(0.0, estimate.mean - 4 * estimate.deviation - self._margin)

    def deadline(self, cost: int) -> float:
        """How long a step of this size may take before its worker counts as hung."""
        estimate = self._estimates.get(cost.bit_length())
        if estimate is None or estimate.count < MIN_SAMPLES:
            return self._deadline_ceiling
        # With at most 100 samples the 99th percentile is the largest.
        return min(self._deadline_ceiling, max(MIN_DEADLINE_S, DEADLINE_FACTOR * estimate.peaks[0][1]))
