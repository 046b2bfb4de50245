"""Speculation: how many draft tokens each decode row of a worker verifies per step.

The worker proposes drafts and verifies them in the step that it computes anyway (speculative decoding, Leviathan et
al., ICML 2023). A row advances by the accepted drafts plus one token. Each draft makes the step longer, so it pays only
if it is likely enough to be accepted. Each row's acceptance is learned from completed steps: the probability that a
draft is accepted if the previous drafts were.

The worker's cost model knows the time of a step without drafts, the time added by a step's first draft, and the time
added by each draft, by number of rows. With few rows, a step waits for weights from memory and drafts are nearly free.
With many rows, a draft costs about as much as any other token. Steps without drafts are measured first. They are
measured again when their time has become uncertain, because rows have changed or the last measurement is old.

`choose_limits` finds the limits with the most expected tokens per second. Limits have few distinct values and change
only every few steps, so that plans remain small. Old measurements are dropped, so a row whose drafts were rejected gets
drafts again later.

The learned values may be wrong, so a *balance* limits the loss. It sums up the time that drafts have saved, measured in
steps. Every step adds `TOLERATED_LOSS`, and the balance is at most `_MOST_SAVED`. While it is negative, all limits are
0. Over any n decode steps, drafts therefore lose at most `TOLERATED_LOSS` * n + `_MOST_SAVED` steps, plus the loss of
the steps in flight when the balance became negative. The bound is as accurate as the expected time of a step without
drafts. It excludes steps with prompt chunks and the first steps with drafts for each number of rows, which measure
their time.

While all limits are 0, a plan needs no more array operations than without speculation.

The limits depend only on the times and values of the core's events, so the same events give the same plans.
"""

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, Int32Array
from scheduler_svc.core.workers.cost_model import CostModel, StepShape
from scheduler_svc.core.workers.draft_cost import LONGEST_PAUSE, DraftCost
from scheduler_svc.core.workers.rows import RowTable

FloatArray = npt.NDArray[np.float64]

PERIOD = 4
"""Steps between two choices of limits while a limit is above 0, and minimum between any two choices."""
IDLE_PERIOD = 32
"""Steps between two choices while all limits are 0 and the decode rows are the same."""
TOLERATED_LOSS = 0.01
"""Share of decode step time that drafts may lose."""
_MOST_SAVED = 4.0
"""Maximum balance, in steps without drafts. When drafts begin to be rejected, they may lose this much of earlier gains.
"""
_HALF_LIFE = 90.0
"""Number of steps without drafts after which half of a row's measured acceptance is dropped."""
_PRIOR_HITS, _PRIOR_TRIES = 0.7, 1.0
"""Initial acceptance of a row: accepted drafts, and verified drafts."""
_LEAST_GAIN = 1.03
"""Minimum expected speedup in tokens per second for which drafts are used."""
_LEAST_ACCEPTANCE = 0.1
"""Minimum acceptance probability for a draft, even if it takes almost no time."""
_PLAIN_SAMPLES = 9
"""Number of steps without drafts to measure first."""
_MEASURED_PART = 0.5
"""Expected time added by the drafts of a measurement, as a share of the step's time without drafts."""
_PLAIN_STALE = 64
"""Steps after which the time of a step without drafts is measured again."""
_DOUBT = 0.25
"""Share of the uncertainty by which the balance assumes a step without drafts to be shorter than expected."""
_MOST_UNCERTAIN = 0.05
"""Uncertainty of a draftless step's time above which it is measured again."""
_ITERATIONS = 4


class Speculation:
    """Draft limits of one worker."""

    def __init__(self, max_drafts: int, costs: CostModel) -> None:
        """Start without measurements. The worker verifies at most `max_drafts` per row and step; 0 for none."""
        self.max_drafts = max_drafts
        self._costs = costs
        self._balance = _MOST_SAVED
        """Steps that drafts may lose before all limits are 0."""
        self._step = 0
        """Calls of `limits`."""
        self._chosen_at = 0
        """`_step` at the last choice."""
        self._chosen_for = NO_INDICES
        """The decode rows of the last choice."""
        self._due = 0
        """`_step` of the next choice, if the decode rows are the same."""
        self._turn = 0
        """Index among the decode rows at which the next measurement of draft times begins."""

    def limits(self, rows: RowTable, decoding: IndexArray) -> Int32Array | None:
        """Return each decode row's draft limit for the next step; None if all are and were 0.

        Args:
            rows: rows of the worker.
            decoding: the decode rows: `rows.decoding`.
        """
        self._step += 1
        if self._balance < 0:
            self._due = 0
            return np.zeros(len(decoding), np.int32) if rows.drafts_allowed else None
        is_new = decoding is not self._chosen_for and self._step >= self._chosen_at + PERIOD
        if is_new or self._step >= self._due:
            limits = self._choose(rows, decoding)
            self._chosen_at, self._chosen_for = self._step, decoding
            return limits if rows.drafts_allowed or limits.any() else None
        return rows.draft_limit[decoding] if rows.drafts_allowed else None

    def measured(self, shape: StepShape, num_tokens: int, duration: float, *, allowed: bool) -> None:
        """Record a step without chunks of prompts, before the cost model learns from it.

        Args:
            shape: the step, with the drafts that it has verified.
            num_tokens: tokens in its result.
            duration: seconds.
            allowed: whether a row was allowed drafts.
        """
        if not shape.rows:
            return
        cost = self._costs.draft_cost(shape.rows)
        plain = shape._replace(drafts=0)
        plain_s = self._costs.expected_s(plain) * (1.0 - _DOUBT * self._costs.uncertainty(plain))
        gain = 0.0
        if not allowed:
            cost.age += 1
        elif plain_s > 0 and cost.is_known:
            gain = num_tokens / shape.rows - cost.counted_s(plain_s, shape.drafts, duration) / plain_s
        self._balance = min(self._balance + gain + TOLERATED_LOSS, _MOST_SAVED)

    def _choose(self, rows: RowTable, decoding: IndexArray) -> Int32Array:
        num_rows = len(decoding)
        idle = decoding[rows.draft_limit[decoding] == 0]
        kept = np.float32(0.5 ** ((self._step - self._chosen_at) / _HALF_LIFE))
        rows.hits[idle] *= kept
        rows.tries[idle] *= kept
        costs, shape = self._costs, StepShape(num_rows, 0, int(rows.length[decoding].sum()))
        self._due = self._step + 1
        is_stale = costs.plain_age > _PLAIN_STALE or costs.uncertainty(shape) > _MOST_UNCERTAIN
        if costs.num_plain < _PLAIN_SAMPLES or is_stale:
            return np.zeros(num_rows, np.int32)
        cost, plain_s = costs.draft_cost(num_rows), costs.expected_s(shape)
        if not cost.is_known:
            return self._measure(num_rows, cost, plain_s)
        if cost.age > cost.pause:
            cost.pause = min(2 * cost.pause, LONGEST_PAUSE)
            return self._measure(num_rows, cost, plain_s)
        acceptance = (rows.hits[decoding] + _PRIOR_HITS) / (rows.tries[decoding] + _PRIOR_TRIES)
        limits = choose_limits(acceptance.astype(np.float64), plain_s, cost.fixed_s, cost.draft_s, self.max_drafts)
        self._due = self._step + (PERIOD if limits.any() else min(cost.pause, IDLE_PERIOD))
        return limits

    def _measure(self, num_rows: int, cost: DraftCost, plain_s: float) -> Int32Array:
        """Return limits that measure the time of drafts: one draft, or in other steps more, while they are cheap."""
        num_drafts = 1 + num_rows // 4
        if cost.draft_s:
            affordable = _MEASURED_PART * plain_s / cost.draft_s
            num_drafts = max(1, int(min(affordable, num_rows * self.max_drafts)))
        if cost.num_steps % 2:
            num_drafts = 1
        limits = np.zeros(num_rows, np.int32)
        full, rest = divmod(num_drafts, self.max_drafts)
        limits[:full] = self.max_drafts
        if rest:
            limits[full] = rest
        self._turn = (self._turn + full + 1) % num_rows
        return np.roll(limits, self._turn)


def fitting(limits: Int32Array, spare: int) -> Int32Array:
    """Return the limits, reduced if necessary so that all rows together have at most `spare` drafts."""
    most = int(limits.max(initial=0))
    while int(limits.sum()) > spare:
        most //= 2
        limits = np.minimum(limits, np.int32(most))
    return limits


def choose_limits(acceptance: FloatArray, base_s: float, fixed_s: float, draft_s: float, most: int) -> Int32Array:
    """Return the draft limits that give the most tokens per second; all 0 if drafts promise no gain.

    A step with n rows takes `base_s`. Drafts add `fixed_s` once, and `draft_s` each. The j-th draft of a row with
    acceptance a is accepted with probability a**j. It pays if this probability exceeds `draft_s` times the tokens per
    second. Because the tokens per second depend on the limits, both are computed in turn (Dinkelbach's method for the
    maximum of a ratio).

    Args:
        acceptance: probability that a row's draft is accepted if the previous drafts were, `[n]`.
        base_s: time of a step without drafts, s.
        fixed_s: time that a step with drafts takes beyond `base_s` and its drafts, s.
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
    plain, rate = num_rows / base_s, 0.0
    limits, tried = none, plain
    for _ in range(_ITERATIONS):
        threshold = max(draft_s * tried, _LEAST_ACCEPTANCE)
        if threshold >= 1:
            break
        paying = np.log(threshold) / np.log(acceptance)
        found = levels[np.searchsorted(levels, paying, side="right") - 1]
        accepted = acceptance * (1 - acceptance**found) / (1 - acceptance)
        better = (num_rows + float(accepted.sum())) / (base_s + fixed_s + draft_s * float(found.sum()))
        if better <= rate:
            break
        limits, rate, tried = found, better, better
    return limits if rate >= _LEAST_GAIN * plain else none
