"""Statistics of a run: percentiles, throughput, goodput and confidence intervals. Pure.

Percentiles are exact: they are computed from all values, with linear interpolation between neighbours.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from measure.load.outcomes import Ending, Outcome
from measure.spread import Spread

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution, for 1 to 20 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits within which a request counts as good, in seconds; None for no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """Limit that 99 % of the request's inter-token gaps must keep."""
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Slo":
        """Parse "ttft_ms=500", "itl_ms=100", "tpot_ms=50", "e2e_ms=2000".

        Raises:
            ValueError: the name is unknown or the limit is not a positive number; the message shows which.
        """
        limits: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
                raise ValueError(f"{text!r}: unknown limit; use ttft_ms=, itl_ms=, tpot_ms= or e2e_ms=")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if not 0 < limit < math.inf:
                raise ValueError(f"{text!r}: not a limit; use a number of milliseconds, such as {name}=500")
            limits[name.removesuffix("_ms") + "_s"] = limit / 1000
        return cls(**limits)

    def is_kept(self, outcome: Outcome) -> bool:
        """Return whether the request completed within all limits."""
        if outcome.ending is not Ending.DONE:
            return False
        gaps = outcome.gaps_s if self.itl_s is not None else ()
        measured = (
            (self.ttft_s, outcome.ttft_s),
            (self.itl_s, float(np.percentile(gaps, 99)) if gaps else None),
            (self.tpot_s, outcome.tpot_s),
            (self.e2e_s, outcome.e2e_s),
        )
        # A missing value, such as the gaps of a single token, exceeds no limit.
        return all(limit is None or value is None or value <= limit for limit, value in measured)

    def describe(self) -> str:
        """Return the limits in one line."""
        limits = {"TTFT": self.ttft_s, "ITL": self.itl_s, "TPOT": self.tpot_s, "e2e": self.e2e_s}
        return ", ".join(f"{name} ≤ {1000 * limit:g} ms" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over repeats with its 95 % confidence interval (Student's t)."""

    mean: float
    half_width: float
    """Half the interval's width; zero for a single repeat, whose spread is unknown."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Return the interval for at least one repeat."""
        count = len(values)
        mean = sum(values) / count
        if count == 1:
            return cls(mean, 0.0)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        factor = _T_95[count - 2] if count - 2 < len(_T_95) else 1.96
        return cls(mean, factor * deviation / math.sqrt(count))

    def to_json(self) -> dict[str, float]:
        """Return the bounds."""
        return {"mean": self.mean, "low": self.mean - self.half_width, "high": self.mean + self.half_width}


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of one run."""

    requests: int
    done: int
    cancelled: int
    failures: Mapping[str, int]
    """Failed requests by kind."""
    wall_s: float
    """Time from the first intended start to the last end."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outputs: Spread
    """Output tokens per response."""
    ttft: Spread
    later_ttft: Spread
    """TTFT of all turns but the first of each session."""
    itl: Spread
    tpot: Spread
    e2e: Spread
    session: Spread
    """Times of completed sessions, from the intended start to the end of the last turn, with all pauses."""
    late: Spread
    """Delay of the generator."""
    good: int
    """Requests within all limits."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], slo: Slo) -> "Figures":
        """Return the metrics over the counted requests. Latencies include only requests that completed."""
        counted = [each for each in outcomes if each.counted]
        done = [each for each in counted if each.ending is Ending.DONE]
        begin = min((each.intended_s for each in counted), default=0.0)
        return cls(
            requests=len(counted),
            done=len(done),
            cancelled=sum(each.ending is Ending.CANCELLED for each in counted),
            failures=dict(Counter(each.failure for each in counted if each.ending is Ending.FAILED)),
            wall_s=max((each.ended_s for each in counted), default=begin) - begin,
            prompt_tokens=sum(each.prompt_tokens for each in counted),
            cached_tokens=sum(each.cached_tokens for each in counted),
            output_tokens=sum(each.output_tokens for each in counted),
            outputs=Spread.of(float(each.output_tokens) for each in done),
            ttft=Spread.of(each.ttft_s for each in done if each.ttft_s is not None),
            later_ttft=Spread.of(each.ttft_s for each in done if each.turn and each.ttft_s is not None),
            itl=Spread.of(gap for each in done for gap in each.gaps_s),
            tpot=Spread.of(each.tpot_s for each in done if each.tpot_s is not None),
            e2e=Spread.of(each.e2e_s for each in done),
            session=Spread.of(each.session_s for each in done if each.session_s is not None),
            late=Spread.of(each.late_s for each in counted),
            good=sum(slo.is_kept(each) for each in done),
        )

    def over(self, wall_s: float) -> "Figures":
        """Return the same metrics for another duration, such as the sum over several runs."""
        return replace(self, wall_s=wall_s)

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return self._per_s(self.done)

    @property
    def goodput(self) -> float:
        """Requests within all limits per second."""
        return self._per_s(self.good)

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self._per_s(self.output_tokens)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return self._per_s(self.prompt_tokens)

    @property
    def good_share(self) -> float:
        """Fraction of requests within all limits, including failed but not cancelled ones in the total."""
        asked = self.requests - self.cancelled
        return self.good / asked if asked else 0.0

    def _per_s(self, count: int) -> float:
        return count / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Running totals at one time in a run."""

    time_s: float
    begun: int
    """Requests that were due."""
    answered: int
    """Requests that have received a first token, or have ended."""


def is_saturated(samples: Sequence[Sample], window_s: float = 10.0) -> bool:
    """Return whether requests arrive faster than the server begins to answer them.

    In each of the last two windows, the number of requests without a first token must have grown by a tenth of the
    arrivals and by three standard deviations of Poisson arrivals. A burst that the server clears is not saturation.
    """
    if not samples or samples[-1].time_s < 2 * window_s:
        return False
    now = samples[-1].time_s
    ends = [next(each for each in samples if each.time_s >= now - back * window_s) for back in (2, 1, 0)]
    for before, after in pairwise(ends):
        begun = after.begun - before.begun
        growth = begun - (after.answered - before.answered)
        if growth <= max(0.1 * begun, 3 * math.sqrt(begun)):
            return False
    return True
