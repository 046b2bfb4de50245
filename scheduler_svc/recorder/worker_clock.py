"""Alignment of a worker's clock with the core's."""

_DRIFT = 2e-5
"""How much two machines' clocks may drift apart, s per s."""


class WorkerClock:
    """Alignment of a worker's clock with the core's: bounds of the difference, made narrower by every step."""

    def __init__(self) -> None:
        self._lowest, self._highest = -float("inf"), float("inf")
        self._at = 0.0

    def learn(self, planned: float, answered: float, received: float, finished: float) -> None:
        """Learn from a step: its plan was not received before it was made, and it was not answered before its end."""
        slack = _DRIFT * max(0.0, answered - self._at)
        self._at = answered
        self._lowest = max(self._lowest - slack, finished - answered)
        self._highest = min(self._highest + slack, received - planned)
        if self._lowest > self._highest:  # a clock was set: start over
            self._lowest, self._highest = finished - answered, received - planned

    def to_core(self, time: float) -> float:
        """Translate a time of the worker's clock."""
        return time - (self._lowest + self._highest) / 2

    @property
    def error_s(self) -> float:
        """Bound of the error."""
        return max(0.0, (self._highest - self._lowest) / 2)
