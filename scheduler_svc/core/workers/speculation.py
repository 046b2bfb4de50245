"""Speculation: how many draft tokens each decode row of a worker verifies per step.

The worker proposes draft tokens and verifies them in the step that it computes anyway (speculative decoding, Leviathan
et al., ICML 2023). A row advances by the accepted drafts and one token more. Each draft makes the step longer, so it
pays only if it is likely enough to be accepted. Two things are learned from answered steps:

* the acceptance of each row: the probability that a draft is accepted if those before it were;
* the time of a step without drafts, and the time that each draft adds, by the number of rows. On few rows, a step waits
  for weights from memory and drafts are nearly free. On many rows, a draft costs about as much as any other token.

`choose_limits` finds the limits that give the most tokens per second. Limits have few distinct values and change every
few steps, so that plans stay differences. Old measurements are forgotten, so a row whose drafts were rejected gets
drafts again later, at a bounded cost.

The limits depend only on the times and values of the core's events, so the same events give the same plans.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.workers.rows import RowTable

FloatArray = npt.NDArray[np.float64]

PERIOD = 4
"""Steps between two choices of limits."""
_FORGETTING = np.float32(0.97)
"""Factor per choice on the measured acceptance of rows without drafts: half of it is forgotten after 90 steps."""
_PRIOR_HITS, _PRIOR_TRIES = 0.7, 1.0
"""Acceptance of a row before its first draft, as so many accepted drafts of so many."""
_LEAST_GAIN = 1.03
"""Least factor on tokens per second that drafts must promise."""
_LEAST_ACCEPTANCE = 0.1
"""Least probability of being accepted that a draft must have, however little time it takes."""
_SAMPLES = 3
"""Steps to measure before a time counts as known."""
_MEASURED_PART = 0.5
"""Time that the drafts of a measurement are expected to add, as a part of the step's time without drafts."""
_GAIN = 0.25
"""Weight of a new measurement."""
_STALE = 256
"""Steps after which a time is measured again."""
_ITERATIONS = 4


@dataclass(slots=True)
class StepCost:
    """Learned times of decode steps with about the same number of rows; seconds."""

    base_s: float = 0.0
    """Time of a step without drafts."""
    draft_s: float = 0.0
    """Time that each draft adds."""
    num_base: int = 0
    """Measurements of `base_s`."""
    num_draft: int = 0
    """Measurements of `draft_s`."""
    base_age: int = 0
    """Steps since the last measurement of `base_s`."""
    draft_age: int = 0
    """Steps since the last measurement of `draft_s`."""

    def measured(self, num_drafts: int, duration: float) -> None:
        """Record the duration of a step that verified so many drafts."""
        self.base_age += 1
        self.draft_age += 1
        if not num_drafts:
            self.num_base += 1
            self.base_age = 0
            self.base_s += max(_GAIN, 1 / self.num_base) * (duration - self.base_s)
        elif self.num_base >= _SAMPLES:
            self.num_draft += 1
            self.draft_age = 0
            sample = max(0.0, duration - self.base_s) / num_drafts
            self.draft_s += max(_GAIN, 1 / self.num_draft) * (sample - self.draft_s)


class Speculation:
    """Draft limits of one worker."""

    def __init__(self, max_drafts: int) -> None:
        """Start without measurements; the worker verifies at most `max_drafts` per row and step, 0: none."""
        self.max_drafts = max_drafts
        self._costs: dict[int, StepCost] = {}
        """By the bit length of the number of decode rows."""
        self._due = 0
        """Steps until the next choice."""
        self._turn = 0
        """The row, counted among the decode rows, with which the next measurement of the time of drafts begins."""

    def limits(self, rows: RowTable, decoding: IndexArray, spare: int) -> Int32Array:
        """Return the draft limit of each decode row for the next step.

        Args:
            rows: rows of the worker.
            decoding: the decode rows.
            spare: most drafts of the step in all.
        """
        self._due -= 1
        limits = rows.draft_limit[decoding]
        if self._due <= 0:
            self._due = PERIOD
            limits = self._choose(rows, decoding)
        most = self.max_drafts
        while int(limits.sum()) > spare:
            most //= 2
            limits = np.minimum(limits, np.int32(most))
        return limits

    def measured(self, num_rows: int, num_drafts: int, duration: float) -> None:
        """Record the duration of a step without chunks of prompts, seconds."""
        if num_rows:
            self._cost(num_rows).measured(num_drafts, duration)

    def _cost(self, num_rows: int) -> StepCost:
        return self._costs.setdefault(num_rows.bit_length(), StepCost())

    def _choose(self, rows: RowTable, decoding: IndexArray) -> Int32Array:
        num_rows = len(decoding)
        idle = decoding[rows.draft_limit[decoding] == 0]
        rows.hits[idle] *= _FORGETTING
        rows.tries[idle] *= _FORGETTING
        cost = self._cost(num_rows)
        if cost.num_base < _SAMPLES or cost.base_age > _STALE:
            self._due = 1
            return np.zeros(num_rows, np.int32)
        if cost.num_draft < _SAMPLES or cost.draft_age > 2 * _STALE:
            self._due = 1
            return self._measure(num_rows, cost)
        acceptance = (rows.hits[decoding] + _PRIOR_HITS) / (rows.tries[decoding] + _PRIOR_TRIES)
        return choose_limits(acceptance.astype(np.float64), cost.base_s, cost.draft_s, self.max_drafts)

    def _measure(self, num_rows: int, cost: StepCost) -> Int32Array:
        """Return limits that measure the time of a draft, with few drafts while it may be long."""
        num_drafts = 1 + num_rows // 4
        if cost.num_draft:
            affordable = _MEASURED_PART * cost.base_s / max(cost.draft_s, 1e-9)
            num_drafts = max(1, int(min(affordable, num_rows * self.max_drafts)))
        limits = np.zeros(num_rows, np.int32)
        full, rest = divmod(num_drafts, self.max_drafts)
        limits[:full] = self.max_drafts
        if rest:
            limits[full] = rest
        self._turn = (self._turn + full + 1) % num_rows
        return np.roll(limits, self._turn)


def choose_limits(acceptance: FloatArray, base_s: float, draft_s: float, most: int) -> Int32Array:
    """Return the draft limits that give the most tokens per second; all 0 if drafts promise no gain.

    A step of n rows takes `base_s`, and `draft_s` more per draft. The j-th draft of a row with acceptance a is accepted
    with probability a**j. It pays if that exceeds `draft_s` times the tokens per second. These depend on the limits, so
    both are computed in turn (Dinkelbach's method for the maximum of a ratio).

    Args:
        acceptance: probability that a draft of the row is accepted if those before it were, `[n]`.
        base_s: time of a step without drafts, s.
        draft_s: time that each draft adds, s.
        most: most drafts per row.

    Returns:
        limits `[n]`: 0, a power of two, or `most`.
    """
    num_rows = len(acceptance)
    none = np.zeros(num_rows, np.int32)
    if not num_rows or not most or base_s <= 0:
        return none
    acceptance = np.clip(acceptance, 0.001, 0.999)
    levels = np.array([0, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most], np.int32)
    rate = plain = num_rows / base_s
    limits = none
    for _ in range(_ITERATIONS):
        threshold = max(draft_s * rate, _LEAST_ACCEPTANCE)
        if threshold >= 1:
            return none
        paying = np.log(threshold) / np.log(acceptance)
        limits = levels[np.searchsorted(levels, paying, side="right") - 1]
        accepted = acceptance * (1 - acceptance**limits) / (1 - acceptance)
        better = (num_rows + float(accepted.sum())) / (base_s + draft_s * float(limits.sum()))
        if better <= rate:
            break
        rate = better
    return limits if rate >= _LEAST_GAIN * plain else none
