"""Search for the highest load within the limits, by doubling and bisection; knee and Pareto front. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_Z_95 = 1.96


def share_interval(good: int, asked: int) -> tuple[float, float]:
    """Return the 95 % confidence interval for a share (Wilson's score interval)."""
    if not asked:
        return 0.0, 1.0
    share = good / asked
    centre = share + _Z_95**2 / (2 * asked)
    width = _Z_95 * math.sqrt(share * (1 - share) / asked + _Z_95**2 / (4 * asked**2))
    scale = 1 + _Z_95**2 / asked
    return max((centre - width) / scale, 0.0), min((centre + width) / scale, 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a load is within the limits."""

    is_kept: bool
    is_sure: bool
    """Whether the confidence interval for the share of good requests excludes the required share."""


def judge(good: int, asked: int, share: float) -> Verdict:
    """Judge a load by its share of good requests.

    Args:
        good: requests within all limits.
        asked: all requests except cancelled ones.
        share: the share that must be good.
    """
    low, high = share_interval(good, asked)
    return Verdict(asked > 0 and good >= share * asked, low > share or high < share)


@dataclass(slots=True)
class Search:
    """State of the search: the load is doubled until it exceeds the limits, then the interval is halved.

    Loads are positive. The interval is halved at its geometric mean, because the tolerance is relative.
    """

    first: float
    last: float
    """Highest load to try."""
    tolerance: float = 0.1
    """The search ends when the lowest load beyond the limits exceeds the highest load within them by at most this
    share.
    """
    is_whole: bool = False
    """Whether loads are whole numbers, such as users."""
    kept: float | None = field(default=None, init=False)
    """Highest load within the limits so far."""
    broken: float | None = field(default=None, init=False)
    """Lowest load beyond the limits so far."""

    def next(self) -> float | None:
        """Return the next load to measure; None when the search is over."""
        if self.kept is None and self.broken is None:
            return self.first
        if self.broken is None:
            assert self.kept is not None
            return min(2 * self.kept, self.last) if self.kept < self.last else None
        if self.kept is None:
            # Even the first load exceeds the limits: search below it, down to a sixteenth.
            return self._usable(self.broken / 2) if self.broken > self.first / 16 else None
        if self.broken <= self.kept * (1 + self.tolerance):
            return None
        return self._usable(math.sqrt(self.kept * self.broken))

    def note(self, load: float, *, is_kept: bool) -> None:
        """Record the result for a load."""
        if is_kept:
            self.kept = max(load, self.kept or 0.0)
        else:
            self.broken = min(load, self.broken or math.inf)

    def _usable(self, load: float) -> float | None:
        if not self.is_whole:
            return load
        whole = round(load)
        return float(whole) if whole >= 1 and whole not in (self.kept, self.broken) else None


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """Return the index of the knee in a latency-throughput curve; None with fewer than three points.

    The knee is the point farthest below the line from the first to the last point, with both axes scaled to [0, 1].
    Beyond the knee, more throughput costs more latency. The points are ordered by load.
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x1 <= x0 or y1 <= y0:
        # Throughput fell, or latency did not grow. Return the measured point with the highest throughput.
        return max(range(len(points)), key=lambda index: points[index][0])
    below = [(x - x0) / (x1 - x0) - (y - y0) / (y1 - y0) for x, y in points]
    return max(range(len(points)), key=lambda index: below[index])


def pareto_front(points: Sequence[tuple[float, float]], *, less_x_is_better: bool = False) -> list[int]:
    """Return the indices of the points that no other point dominates.

    More y is better; so is more x, unless `less_x_is_better`. The indices are ordered by x. Among equal points, the
    first one is returned.
    """
    sign = -1.0 if less_x_is_better else 1.0
    # In descending order of x, a point is on the Pareto front if its y exceeds all earlier values.
    order = sorted(range(len(points)), key=lambda index: (-sign * points[index][0], -points[index][1], index))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return sorted(front, key=lambda index: points[index][0])
