"""Prediction: forecast times for a request's start, first token and end, made on arrival."""

import re
from typing import NamedTuple

SHARES = (0.05, 0.5, 0.9)
"""Shares of requests whose times are within the respective quantile."""


_TEXT = "forecast: row within %.3f s (90 %%: %.3f s), first token within %.3f s (90 %%: %.3f s)"
_END = ", end within %.3f s (90 %%: %.3f s)"


class Estimate(NamedTuple):
    """Quantiles of a future time, in seconds from the request's arrival."""

    regime: int
    """Number of the estimate's regime, see `queueing.calibration`."""
    bases: tuple[float, float, float]
    """Rough estimates, one for each of `SHARES`."""
    values: tuple[float, float, float]
    """Quantiles for `SHARES`."""

    @property
    def surely(self) -> float:
        """Time that 95 percent of requests exceed."""
        return self.values[0]

    @property
    def median(self) -> float:
        """Time that half of the requests do not exceed."""
        return self.values[1]

    @property
    def p90(self) -> float:
        """Time that 90 percent of the requests do not exceed."""
        return self.values[2]


class Prediction(NamedTuple):
    """One request's times, forecast on arrival and relative to it."""

    is_blocked: bool
    """Whether the request had to wait for others to end."""
    wait: Estimate
    """Time until it has a row."""
    first_token: Estimate
    end: Estimate | None
    """Time until its last token; None if its length is unknown."""

    @property
    def line(self) -> "ForecastLine":
        """What the request's history shows of the prediction."""
        (_, row, row_p90), (_, first, first_p90) = self.wait.values, self.first_token.values
        return ForecastLine(row, row_p90, first, first_p90, None if self.end is None else self.end.values[1:])


class ForecastLine(NamedTuple):
    """Median and 90th percentile of the times in a request's history; its text is made when somebody reads it."""

    row: float
    row_p90: float
    first_token: float
    first_token_p90: float
    end: tuple[float, float] | None
    """None if its length is unknown."""

    @property
    def text(self) -> str:
        """The line, read by `read_text`."""
        text = _TEXT % self[:4]
        return text if self.end is None else text + _END % self.end


class Forecasted(NamedTuple):
    """Forecast of one event as read from a request's history, in seconds from its arrival."""

    of: str
    """"row", "first token" or "end"."""
    median: float
    p90: float


def read_text(text: str) -> list[Forecasted]:
    """Return the forecasts in the text of a `ForecastLine`."""
    found = re.findall(r"(row|first token|end) within ([\d.]+) s \(90 %: ([\d.]+) s\)", text)
    return [Forecasted(of, float(median), float(p90)) for of, median, p90 in found]
