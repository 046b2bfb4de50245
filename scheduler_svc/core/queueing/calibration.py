"""Calibration: turns rough time estimates into quantiles with the correct coverage.

An estimate from queue and costs is rough, because it ignores memory, other policies, and later requests. Therefore the
quantiles of the ratio between actual time and estimate are tracked (stochastic approximation, Robbins and Monro, 1951).
A quantile moves up if the actual time was above the forecast, and down otherwise. For any distribution, the step sizes
ensure in the long run that the right fraction of times is below the forecasts. The comparison uses the forecast as it
was made, not
the current quantile: in a burst, many requests arrive before the first result corrects the quantile, and all their
forecasts may be wrong. Ratios are tracked separately for estimates of different size and for requests that must wait
until others end (*regimes*).

The achieved coverage is exported as metrics.
"""

from collections.abc import Sequence
from math import exp, log

from scheduler_svc.core.requests.prediction import SHARES, Estimate

_FIRST = (-1.1, 0.0, 0.7)
"""Logarithms of the ratios before the first measurement."""
_GAIN = 0.05
_EARLY = 15
"""Number of requests after which a regime's gain is constant and other regimes no longer start from its values."""
_LEAST_DISTANCE, _MOST_DISTANCE = 0.01, 3.0
_OFFSET_S = 0.001
"""Added to measured and estimated times, so that no ratio divides by zero."""
_SHARES = tuple(enumerate(SHARES))
_REGIMES = 8
"""Number of estimate sizes, each four times the previous one; the smallest is 10 ms."""


class _Ratios:
    """Quantiles of the logarithm of actual time / estimate in one regime."""

    def __init__(self, values: Sequence[float], distances: Sequence[float]) -> None:
        self.values = list(values)
        self.distances = list(distances)
        """Mean distances of the logarithms from each quantile."""
        self.count = 0
        self._factors: tuple[float, float, float] | None = None
        """The quantiles of the ratio; None if they must be computed from `values`."""

    @property
    def factors(self) -> tuple[float, float, float]:
        """Quantiles of the ratio. Many requests may be forecast between two measurements."""
        if self._factors is None:
            low, middle, high = self.values
            self._factors = exp(low), exp(middle), exp(high)
        return self._factors

    def add(self, logs: Sequence[float], seconds: float, forecasts: Sequence[float]) -> None:
        """Record a true time, its forecast for each share, and the logarithm of true time / estimate for each share."""
        self.count += 1
        self._factors = None
        gain = _GAIN if self.count > _EARLY else 1.0 / (self.count + 5)
        for at, share in _SHARES:
            value, mean = self.values[at], self.distances[at]
            distance = abs(logs[at] - value)
            if distance > _MOST_DISTANCE:
                distance = _MOST_DISTANCE
            self.distances[at] = mean = mean + gain * (distance - mean)
            step = 2.0 * gain * (mean if mean > _LEAST_DISTANCE else _LEAST_DISTANCE)
            self.values[at] = value + step * (share if seconds > forecasts[at] else share - 1.0)


class Calibration:
    """Quantiles for one kind of time, and their accuracy."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._all = _Ratios(_FIRST, (0.5,) * len(SHARES))
        self._regimes: dict[int, _Ratios] = {}
        self.count = 0
        """Requests whose time was observed."""
        self.within_median = 0
        """Requests whose time was within the predicted median."""
        self.within_p90 = 0
        """Requests whose time was within the predicted 90th percentile."""

    def estimate(self, bases: tuple[float, float, float], *, is_blocked: bool) -> Estimate:
        """Return the quantiles of a time.

        Args:
            bases: rough estimates of the quantiles for `SHARES`, s.
            is_blocked: whether the request must wait until others end.
        """
        first, second, third = bases
        size = (int(second * 100).bit_length() + 1) // 2
        regime = 2 * (size if size < _REGIMES else _REGIMES - 1) + is_blocked
        low, middle, high = self._regimes.get(regime, self._all).factors
        surely = (first + _OFFSET_S) * low - _OFFSET_S
        if surely < 0.0:
            surely = 0.0
        median = (second + _OFFSET_S) * middle - _OFFSET_S
        if median < surely:
            median = surely
        p90 = (third + _OFFSET_S) * high - _OFFSET_S
        return Estimate(regime, bases, (surely, median, p90 if p90 > median else median))

    def happened(self, estimate: Estimate, seconds: float) -> None:
        """Record the true time of a request with this estimate."""
        self.count += 1
        regime, (first, second, third), forecasts = estimate
        _, median, p90 = forecasts
        self.within_median += seconds <= median
        self.within_p90 += seconds <= p90
        middle = log((seconds + _OFFSET_S) / (second + _OFFSET_S))
        logs = middle, middle, middle
        if first != second or second != third:
            low, high = (
                log((seconds + _OFFSET_S) / (first + _OFFSET_S)),
                log((seconds + _OFFSET_S) / (third + _OFFSET_S)),
            )
            logs = low, middle, high
        ratios = self._regimes.get(regime)
        if ratios is None:
            ratios = self._regimes[regime] = _Ratios(self._all.values, self._all.distances)
        ratios.add(logs, seconds, forecasts)
        if ratios.count <= _EARLY:
            self._all.add(logs, seconds, forecasts)
