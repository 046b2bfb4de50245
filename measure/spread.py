"""Distribution of measured values, as every benchmark reports it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a number."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the distribution of the values; all fields are zero without values."""
        all_values = np.fromiter(values, float)
        if not all_values.size:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99, p999 = np.percentile(all_values, (50, 90, 95, 99, 99.9)).tolist()
        return cls(int(all_values.size), float(all_values.mean()), p50, p90, p95, p99, p999, float(all_values.max()))

    def to_json(self) -> dict[str, float]:
        """Return the numbers by name; the 99.9th percentile is "p99.9"."""
        return {"p99.9" if name == "p999" else name: value for name, value in asdict(self).items()}

    def named(self, *names: str, digits: int = 12) -> dict[str, float]:
        """Return the selected numbers by name, rounded to this many decimal places."""
        return {name: round(getattr(self, name), digits) for name in names}


def median_and_range(values: Sequence[float], digits: int) -> dict[str, float]:
    """Return median, minimum and maximum over the rounds of a measurement by name, rounded."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }
