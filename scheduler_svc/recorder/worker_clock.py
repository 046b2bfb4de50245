"""Alignment of a worker's clock with the core's."""

_DRIFT = 2e-5
"""Maximum drift between the clocks of two machines, s per s."""


class WorkerClock:
    """Alignment of a worker's clock with the core's clock, by bounds on their difference that every step narrows."""

    def __init__(self) -> None:
        self._lowest, self._highest = -float("inf"), float("inf")
        self._at = 0.0

    def learn(self, planned: float, answered: float, received: float, finished: float) -> None:
        """Learn from a step: its plan was received after it was made, and its result was sent after its end."""
        slack = _DRIFT * max(0.0, answered - self._at)
        self._at = answered
        self._lowest = max(self._lowest - slack, finished - answered)
        self._highest = min(self._highest + slack, received - planned)
        if self._lowest > self._highest:  # A clock was adjusted, so start over.
            self._lowest, self._highest = finished - answered, received - planned

    def place(
        self, planned: float, answered: float, *, received: float, forward_began: float, before_s: float, busy_s: float
    ) -> tuple[float, float]:
        """Learn from a step; return when it began and ended, on the core's clock.

        Args:
            planned: when its plan was made, on the core's clock.
            answered: when its result arrived, on the core's clock.
            received: when the worker received the plan, on its clock.
            forward_began: when the forward pass began, on its clock.
            before_s: time that the worker spent on the step before the forward pass.
            busy_s: time that the worker spent on the step from the beginning of the forward pass on.
        """
        self.learn(planned, answered, received, forward_began + busy_s)
        start = self.to_core(forward_began - before_s)
        return max(min(start, answered), planned), min(start + before_s + busy_s, answered)

    def to_core(self, time: float) -> float:
        """Translate a time of the worker's clock."""
        return time - (self._lowest + self._highest) / 2

    @property
    def error_s(self) -> float:
        """Return a bound on the error."""
        return max(0.0, (self._highest - self._lowest) / 2)
