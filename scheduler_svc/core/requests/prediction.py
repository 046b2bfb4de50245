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
    def text(self) -> str:
        """The prediction as a line of the request's history, read by `read_text`."""
        wait, first = self.wait.values, self.first_token.values
        text = _TEXT % (wait[1], wait[2], first[1], first[2])
        return text if self.end is None else text + _END % (self.end.values[1], self.end.values[2])


class Forecasted(NamedTuple):
    """Forecast of one event as read from a request's history, in seconds from its arrival."""

    of: str
    """"row", "first token" or "end"."""
    median: float
    p90: float


def read_text(text: str) -> list[Forecasted]:
    """Return the forecasts in a line made by `Prediction.text`."""
    found = re.findall(r"(row|first token|end) within ([\d.]+) s \(90 %: ([\d.]+) s\)", text)
    return [Forecasted(of, float(median), float(p90)) for of, median, p90 in found]
