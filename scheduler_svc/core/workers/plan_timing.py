"""Plan timing: how long after the start of a step to send the next plan.

A plan is sent *just in time*: late enough to include recent arrivals and cancellations, and early enough that the
worker never waits. `cost_model` gives a lower bound on the step's time. The margin before this time depends on the
unpredictable load of scheduler, link and machine, so it is learned: it increases by the worker's waiting time, and
otherwise decreases slowly.
"""

LEAD_S = 0.002
"""Minimum margin, s: time for planning, encoding and the link."""
TOLERATED_IDLE = 0.02
"""Idle time before a step that is tolerated, as a share of the step's time. It occurs even if a plan is waiting."""
_MARGIN_DECAY = 0.01
"""Share of the learned margin that each step removes."""
EARLY_S = 0.001
"""How early a plan may be sent, in seconds, so that plans for many workers share one turn of the loop."""


class PlanTiming:
    """One worker's learned margin; all times in seconds."""

    def __init__(self) -> None:
        """Start with the minimum margin."""
        self._margin = LEAD_S

    def idled(self, expected_s: float, idle: float) -> None:
        """Record the idle time before a step that could have been planned earlier.

        Args:
            expected_s: expected time of the step.
            idle: time that the worker waited before it.
        """
        self._margin += _MARGIN_DECAY * (LEAD_S - self._margin)
        if expected_s > 0 and idle > TOLERATED_IDLE * expected_s:
            # If the margin equals the step time, the next plan is sent immediately. A larger margin would have no
            # further effect and would take longer to shrink.
            self._margin = max(LEAD_S, min(self._margin + idle, expected_s))

    def lead(self, least_s: float) -> float:
        """Return how long after the start of a step to send the next plan, if the step takes at least `least_s`."""
        return max(0.0, least_s - self._margin)
