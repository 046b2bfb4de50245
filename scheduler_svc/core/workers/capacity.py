"""Capacity: the free memory that the admission of a request requires.

* `guaranteed_no_evict`: the blocks for its longest possible sequence, together with those for every running request. A
  started request is never preempted for memory.
* `max_utilization`: the blocks for its current tokens, and a *headroom* for the growth of running requests.

With too much headroom, fewer requests run. With too little, requests are preempted and recomputed. This model
determines the headroom:

* Running requests take blocks until one of them ends and releases its blocks. The number of blocks taken in such an
  interval is roughly exponentially distributed, with a measured mean `g`.
* A headroom of `h` blocks is too small in a share `exp(-h / g)` of the intervals. Each time, a preemption costs `c`
  steps.
* In return, `h` of `n` blocks are unused for the `d` steps of an interval.
* The loss `c * exp(-h / g) + d * h / n` is least for `h = g * log(c * n / (g * d))`, the newsvendor's order quantity.
* Near the optimum, the loss hardly changes, and preemptions also interrupt streams. Therefore `c` is twice the measured
  cost.

Intervals are correlated: if memory ran out in one, it is likely to run out in the next. Each preemption therefore
increases the headroom for several tens of steps.

The headroom is at most the number of blocks that running requests can still take before they reach their limits. It is
0 if no running request has credit to continue, because it would only keep the worker idle.
"""

import math

from scheduler_svc.core.workers.rows import RowTable

_COST_FACTOR = 2.0
"""Factor applied to the measured cost of a preemption."""
_MOST = 0.5
"""Maximum headroom, as a share of all blocks."""
_PER_PREEMPTION = 0.005
"""Headroom that one preemption adds, as a share of all blocks."""
_DECAY = 0.02
"""Fraction of the headroom from preemptions that each step removes. Half of it is gone after 35 steps."""
_SMOOTHING = 0.05
"""Weight of the newest interval between two releases."""
_COST_SMOOTHING = 0.1
"""Weight of the newest preemption."""


class Capacity:
    """The admission test of one worker."""

    def __init__(self, mode: str, num_blocks: int) -> None:
        """Start without measurements.

        Args:
            mode: one of CAPACITY_MODES.
            num_blocks: blocks of the worker.
        """
        self._guaranteed = mode == "guaranteed_no_evict"
        self._num_blocks = num_blocks
        self.is_growing = True
        """Whether a running request continues and may need blocks. The planner sets it before admissions."""
        self._num_releases = 0
        self._growth = 0.0
        """Mean number of blocks that running requests took between two releases."""
        self._interval = 0.0
        """Mean number of steps between two releases."""
        self._blocks_since = 0
        """Blocks taken since the last release."""
        self._steps_since = 0
        """Steps since the last release."""
        self._cost = _COST_FACTOR
        """Mean number of steps that a preemption costs, times the factor."""
        self._added = 0.0
        """Blocks that preemptions have added to the headroom, minus what steps have removed."""
        self._headroom: int | None = 0
        """Cached value; None if it must be recomputed."""

    @property
    def headroom(self) -> int:
        """Number of blocks that an admission leaves for running requests, unless they can use fewer."""
        if self._headroom is None:
            headroom = self._added
            product = self._growth * self._interval
            if product:
                headroom += self._growth * math.log(max(1.0, self._cost * self._num_blocks / product))
            self._headroom = int(min(headroom, _MOST * self._num_blocks))
        return self._headroom

    def admits(
        self, rows: RowTable, *, num_new: int, worst_blocks: int, num_available: int, growth: int | None = None
    ) -> bool:
        """Return whether a request fits.

        Args:
            rows: those of the worker.
            num_new: blocks to take for its present tokens.
            worst_blocks: blocks of its longest possible sequence, shared ones included.
            num_available: blocks that can be taken now.
            growth: further blocks for another request, if that one is admitted first. Then `num_new` and `worst_blocks`
                include both requests.
        """
        if num_new > num_available:
            return False
        if not rows.num_running and growth is None:
            return True
        if self._guaranteed:
            return rows.worst_blocks + worst_blocks <= self._num_blocks
        return num_new + self.reserve(rows, growth or 0) <= num_available

    def reserve(self, rows: RowTable, growth: int = 0) -> int:
        """Return the number of blocks that an admission must leave for running requests.

        Args:
            rows: those of the worker.
            growth: blocks that a further request may take.
        """
        if not (self.is_growing or growth):
            return 0
        left = rows.worst_blocks - rows.num_table_blocks - rows.num_window_blocks
        return min(self.headroom, left + growth)

    def grew(self, num_blocks: int) -> None:
        """Record that running requests took blocks for further tokens."""
        self._blocks_since += num_blocks

    def released(self) -> None:
        """Record that a request permanently released its blocks."""
        self._num_releases += 1
        weight = max(_SMOOTHING, 1 / self._num_releases)
        self._growth += weight * (self._blocks_since - self._growth)
        self._interval += weight * (self._steps_since - self._interval)
        self._blocks_since = self._steps_since = 0
        self._headroom = None

    def preempted(self, cost: float) -> None:
        """Record a preemption for memory that costs `cost` steps."""
        self._cost += _COST_SMOOTHING * (_COST_FACTOR * cost - self._cost)
        self._added += _PER_PREEMPTION * self._num_blocks
        self._headroom = None

    def step_planned(self) -> None:
        """Record that a step was planned."""
        self._steps_since += 1
        self._added *= 1 - _DECAY
        self._headroom = None
