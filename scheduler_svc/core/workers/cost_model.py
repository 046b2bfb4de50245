"""Cost model: one worker's step times, learned from its completed steps.

A step's expected time is the sum of a fixed part and parts for each decode row, each prompt token, each context token
that decode rows read, each copied block and each draft. No part is negative. Every decision that depends on a
worker's speed uses this model: chunk sizes, the time of the next plan, drafts, swapping, admission by deadline,
placement and forecasts.

* Fixed part, rows, prompt tokens and context are fitted together by a Kalman filter (`step_line`). The filter also
  gives the uncertainty for steps that were never measured.
* Initially, the coefficients are those of a typical device, scaled by the time of the first step.
* A step's deviation from its expected time is clipped to `_MOST_SURPRISE` standard deviations, because most such steps
  were disturbed. Several consecutive large deviations mean that the speed has changed. The coefficients then become
  uncertain again and adapt immediately.
* The worker measures copy times separately (`copy_cost`). The cost of drafts is fitted to the difference between the
  time of steps with drafts and the expected time without drafts (`draft_cost`). Steps with drafts do not change the
  other coefficients, so that these do not absorb the cost of drafts.

The model depends only on the core's event times, so the same events give the same plans. An update is a few
microseconds of plain arithmetic.
"""

from math import sqrt
from typing import NamedTuple

from scheduler_svc.core.workers.copy_cost import CopyCost
from scheduler_svc.core.workers.draft_cost import DraftCost
from scheduler_svc.core.workers.step_line import Column, StepLine

_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02, 0.1, 0.3
"""Bounds on the assumed relative noise of a step's time, and its initial value."""
_MOST_SURPRISE = 3.0
_RISES, _FALLS = 3, 2
"""Consecutive surprising steps, slower or faster than expected, after which the speed counts as changed. Fewer fast
steps suffice, because a disturbance can only slow a step down.
"""
_MOST_FALL = 0.5
"""A step that is faster than expected by more than this share is a surprise, regardless of the noise."""
_EARLY_STEPS = 8
"""Number of steps of a kind after which their deviation is known and smoothed over more steps."""
_BATCH = 8
"""Decode steps with the same number of rows that correct the coefficients together."""
_PEAK_DECAY = 0.98
_KNOWN_STEPS = 20
"""Number of measured steps of a kind required before a maximum step time is derived from them."""
_KNOWN = 0.5
"""Maximum uncertainty at which a step's maximum time is derived from its expected time."""
_MAX_FACTOR = 8.0
"""A step counts as hung after this many times the maximum time of such steps."""
MIN_DEADLINE_S = 1.0
_PASSING_STEPS = 1000
"""Number of steps after which a slower speed counts as lasting."""


class StepShape(NamedTuple):
    """Work of a step."""

    rows: int = 0
    """Decode rows."""
    prompt_tokens: int = 0
    """Budget tokens of the chunks: prompt tokens, charged for their context (`chunks`)."""
    context: int = 0
    """Tokens whose KV the decode rows read."""
    drafts: int = 0
    """Draft tokens that the step verifies."""


NO_STEP = StepShape()


class _Kind:
    """Steps of one kind: decode only, with chunks, or with drafts."""

    def __init__(self) -> None:
        self.count = 0
        self.deviation = 0.25
        """Mean relative distance between actual and expected step time."""
        self.surprises = 0
        """Consecutive surprising steps; negative if they were faster than expected."""
        self.peak = 1.0
        """Largest recent ratio of a step's time to its expected time, with decay."""

    def measured(self, ratio: float) -> None:
        """Record the ratio of a step's time to its expected time."""
        distance = ratio - 1.0 if ratio > 1.0 else 1.0 - ratio
        gain = 0.25 if self.count < _EARLY_STEPS else 0.125
        # Limit the weight of a disturbed step while few steps were measured.
        self.deviation += gain * (min(distance, 2.0 * self.deviation + 0.05, 1.0) - self.deviation)
        peak = self.peak * _PEAK_DECAY
        self.peak = ratio if ratio > peak else max(peak, 1.0)
        self.count += 1

    def usual(self, distance: float, number: int) -> None:
        """Record several steps near their expected time; `distance` is their mean relative distance from it."""
        self.surprises = 0
        self.count += number
        self.deviation += (1.0 - 0.875**number) * (distance - self.deviation)
        self.peak = max(self.peak * _PEAK_DECAY**number, 1.0 + distance)


class CostModel:
    """One worker's learned step times; all times in seconds."""

    def __init__(self) -> None:
        """Start without measurements; all times are 0 until the first step."""
        self._line = StepLine()
        self._copies = CopyCost()
        self._reads = CopyCost()
        """Cost of reading blocks from disk to host memory."""
        self.steps_with_drafts: dict[int, DraftCost] = {}
        """Cost of drafts by bit length of the number of rows.

        With few rows, a step waits for weights and drafts are cheap.
        """
        self.plain_age = 0
        """Number of steps with drafts since the last step without any."""
        self._decodes, self._chunks, self._drafting = _Kind(), _Kind(), _Kind()
        self._batch_rows = self._batch_steps = self._batch_context = 0
        self._batch_s = self._batch_distance = 0.0
        """Rows, number, context sums, times and errors of the last decode steps that are not applied yet."""
        self._batch_expected = self._batch_usual = 0.0
        """Expected time of these steps, and the largest error of a usual step."""
        self._lasting = 1.0
        """Share of the expected time that steps would take if the last slowdown passed; 1 if there was none lately."""
        self._bounds = (0.0, 0.0, 0.0)
        self._bounds_rows = self._bounds_left = 0
        """Number of rows, and of decode steps with these rows for which the last bounds are reused."""

    # ---------------------------------------------------------------- questions

    @property
    def fixed_s(self) -> float:
        """Time of a step that does not depend on its contents."""
        return self._line.fixed_s

    @property
    def row_s(self) -> float:
        """Time per decode row."""
        return self._line.row_s

    @property
    def prompt_token_s(self) -> float:
        """Time per budget token of a chunk."""
        return self._line.prompt_token_s

    @property
    def context_token_s(self) -> float:
        """Time per token of context that decode rows read."""
        return self._line.context_token_s

    @property
    def block_copy_s(self) -> float:
        """Time per block that is copied between device and host; 0 if not measured."""
        return self._copies.block_s

    @property
    def copies_overlap(self) -> bool:
        """Whether block copies between device and host overlap with steps."""
        return self._copies.overlaps

    def parts(self) -> dict[str, float]:
        """Return the learned times by part, for operators."""
        return {
            "fixed": self.fixed_s,
            "row": self.row_s,
            "prompt_token": self.prompt_token_s,
            "context_token": self.context_token_s,
            "block_copy": self.block_copy_s,
            "block_read": self._reads.block_s,
        }

    @property
    def cautious_prompt_token_s(self) -> float:
        """Time per budget token of a chunk, plus its standard deviation, because short prompts reveal little."""
        return self._line.prompt_token_s + sqrt(self._line.prompt_token_variance)

    @property
    def is_measured(self) -> bool:
        """Whether a step was measured."""
        return self._decodes.count > 0 or self._chunks.count > 0

    @property
    def num_plain(self) -> int:
        """Number of measured steps that only decode, without drafts."""
        return self._decodes.count

    @property
    def has_chunks(self) -> bool:
        """Whether a step with a chunk of a prompt was measured."""
        return self._chunks.count > 0

    def expected_s(self, shape: StepShape) -> float:
        """Return the expected time of a step, without block copies; 0 before the first measurement."""
        rows, prompt_tokens, context, drafts = shape
        seconds = self._line.expected_s((rows, prompt_tokens, context))
        return seconds + self.draft_cost(rows).added_s(drafts) if drafts else seconds

    def uncertainty(self, shape: StepShape) -> float:
        """Return the relative standard deviation of the expected time, without drafts and noise."""
        column = shape[:3]
        expected = self._line.expected_s(column)
        return sqrt(self._line.variance(column)) / expected if expected > 0 else 1.0

    def noise(self, shape: StepShape) -> float:
        """Return the mean relative distance between actual and expected times of such steps."""
        return self._kind(shape).deviation

    def bounds(self, shape: StepShape, ceiling: float) -> tuple[float, float, float]:
        """Return a lower bound that nearly all such steps exceed, the expected time, and the timeout for a hang.

        Args:
            shape: the step.
            ceiling: maximum of the last time, which is returned while the time of such steps is unknown.
        """
        rows, prompt_tokens, _, drafts = shape
        is_plain = not prompt_tokens and not drafts
        if is_plain and rows == self._bounds_rows and self._bounds_left:
            self._bounds_left -= 1
            return self._bounds
        kind, expected, doubt = self._kind(shape), self.expected_s(shape), self.uncertainty(shape)
        least = expected * _least_share(kind, doubt)
        longest = ceiling
        if kind.count >= _KNOWN_STEPS and doubt <= _KNOWN:
            longest = min(ceiling, max(MIN_DEADLINE_S, _MAX_FACTOR * expected * (kind.peak + 3.0 * doubt)))
        found = least, expected, longest
        if is_plain and kind.count >= _KNOWN_STEPS:
            self._bounds, self._bounds_rows, self._bounds_left = found, rows, _BATCH
        return found

    def least_s(self, shape: StepShape) -> float:
        """Return a time that nearly all such steps will exceed, even if the last slowdown passes.

        A machine under pressure can be slow for minutes. The time is 0 while little is known about such steps.
        """
        kind = self._kind(shape)
        if kind.count < _KNOWN_STEPS:
            return 0.0
        return self.expected_s(shape) * _least_share(kind, self.uncertainty(shape)) * self._lasting

    def decode_s(self, num_rows: int, context: int) -> float:
        """Return the expected time of a step that only decodes, without drafts; `context`: tokens that rows read."""
        return self._line.expected_s((num_rows, 0, context))

    def prefill_s(self, num_tokens: float, budget: int, decode_s: float) -> float:
        """Return the expected time until a prompt is computed, while other requests run.

        Args:
            num_tokens: uncached tokens in the prompt, and in prompts that are computed before it.
            budget: prompt tokens per step.
            decode_s: time of a step without prompt tokens, s.
        """
        return max(1.0, num_tokens / budget) * decode_s + num_tokens * self._line.prompt_token_s

    def recompute_steps(self, num_tokens: int, num_running: int) -> float:
        """Return the cost of recomputing tokens, in steps with one row.

        The unit is the part of a step's time that does not depend on the number of rows, because only this part is lost
        when a row is empty for one step. Before the first measurement, a preemption costs one step.

        Args:
            num_tokens: tokens of the preempted request.
            num_running: rows of a step.
        """
        step = self.fixed_s + self.row_s * num_running
        if not step or not self.has_chunks:
            return 1.0
        return num_tokens * self.prompt_token_s / max(self.fixed_s, 0.1 * step)

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to swap a preempted request's blocks instead of recomputing its tokens.

        Both times are measured. Without a measurement, blocks are copied, so that there is one.
        """
        return not self.has_chunks or self._copies.pays(num_blocks, num_tokens * self.prompt_token_s)

    def moves(self, block_size: int, return_chance: float) -> bool:
        """Return whether to move cached blocks of so many tokens to the host instead of evicting them."""
        return not self.has_chunks or self._copies.move_pays(block_size * self.prompt_token_s, return_chance)

    def moves_sequence(self, num_blocks: int, num_tokens: int, return_chance: float) -> bool:
        """Return whether to move the blocks and the state of a prefix to the host instead of losing it.

        Args:
            num_blocks: its blocks, and those as which its state counts.
            num_tokens: budget tokens to compute it.
            return_chance: chance that a request continues with it.
        """
        recompute_s = num_tokens * self.prompt_token_s
        return not self.has_chunks or self._copies.sequence_pays(num_blocks, recompute_s, return_chance)

    def restores(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to copy cached blocks back from the host instead of computing `num_tokens` budget tokens."""
        return not self.has_chunks or self._copies.return_pays(num_blocks, num_tokens * self.prompt_token_s)

    def keeps_on_disk(self, block_size: int) -> bool:
        """Return whether to write blocks of so many tokens to disk, so that they can be read instead of computed."""
        return not self.has_chunks or self._reads.read_pays(1, block_size * self.prompt_token_s)

    def reads(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to read blocks from disk, and copy them to the device, instead of computing their tokens.

        Args:
            num_blocks: the blocks, and those that are read before them.
            num_tokens: budget tokens to compute the blocks.
        """
        recompute_s = num_tokens * self.prompt_token_s - num_blocks * self._copies.block_s
        return not self.has_chunks or self._reads.read_pays(num_blocks, recompute_s)

    def may_read(self, num_blocks: int, num_tokens: int) -> bool:
        """Like `reads`, but without a try from time to time, for a comparison that starts nothing."""
        recompute_s = num_tokens * self.prompt_token_s - num_blocks * self._copies.block_s
        return not self.has_chunks or self._reads.return_pays(num_blocks, recompute_s)

    @property
    def block_copy_tokens(self) -> float:
        """Budget tokens of a chunk that take as long as a copied block; 0 if not measured."""
        return self._copies.block_s / self.prompt_token_s if self.prompt_token_s else 0.0

    def draft_cost(self, num_rows: int) -> DraftCost:
        """Return the learned cost of drafts in steps with about `num_rows` rows."""
        size = num_rows.bit_length()
        found = self.steps_with_drafts.get(size)
        if found is None:
            found = self.steps_with_drafts[size] = DraftCost()
        return found

    # ---------------------------------------------------------------- measurements

    def measured(self, shape: StepShape, duration: float, *, drafts_allowed: bool = False) -> None:
        """Record a step result.

        Args:
            shape: the step, with the drafts that it has verified.
            duration: from its start to its result, without block copies.
            drafts_allowed: whether a row was allowed drafts. Searching for drafts takes time even if there are none.
        """
        rows, prompt_tokens, context, drafts = shape
        if self._batch_steps and rows == self._batch_rows and not prompt_tokens and not drafts_allowed:
            error = duration - self._batch_expected
            if -self._batch_usual <= error <= self._batch_usual:
                self._batch_steps += 1
                self._batch_context += context
                self._batch_s += duration
                self._batch_distance += error if error > 0 else -error
                if self._batch_steps == _BATCH:
                    self._finish_batch()
                return
        if duration <= 0 or not rows + prompt_tokens:
            return
        column = rows, prompt_tokens, context
        if not self.is_measured:
            self._line.begin(column, duration)
        expected = self._line.expected_s(column)
        if drafts_allowed:
            self._finish_batch()
            self.plain_age += 1
            self._drafting.measured(duration / max(self.expected_s(shape), 1e-9))
            if not prompt_tokens:
                self.draft_cost(rows).measured(expected, drafts, duration)
            return
        if prompt_tokens:
            self._finish_batch()
            self._update(self._chunks, column, expected, duration)
        else:
            self.plain_age = 0
            self._decoded(rows, context, expected, duration)

    def copies_measured(self, num_blocks: int, seconds: float, delay_s: float | None) -> None:
        """Record that the worker copied blocks between device and host.

        Args:
            num_blocks: number of blocks.
            seconds: duration of the copies, s.
            delay_s: how much longer the step took because of them, s; None if the step did nothing else.
        """
        self._copies.measured(num_blocks, seconds, delay_s)

    def reads_measured(self, num_blocks: int, seconds: float) -> None:
        """Record that the worker read blocks from disk."""
        self._reads.measured(num_blocks, seconds)

    # ---------------------------------------------------------------- the filter

    def _kind(self, shape: StepShape) -> _Kind:
        if shape.drafts:
            return self._drafting
        return self._chunks if shape.prompt_tokens else self._decodes

    def _decoded(self, rows: int, context: int, expected: float, duration: float) -> None:
        """Record a step that only decodes.

        Most steps of a busy worker are of this kind. To save time, consecutive steps with the same number of rows and
        about the expected time correct the coefficients together, by their mean.
        """
        kind, error = self._decodes, duration - expected
        usual = (2.0 * kind.deviation + _LEAST_NOISE) * expected
        if kind.count < _KNOWN_STEPS or not -usual <= error <= usual:
            self._finish_batch()
            self._update(kind, (rows, 0, context), expected, duration)
            return
        self._finish_batch()
        self.plain_age = 0
        self._batch_rows, self._batch_steps, self._batch_context = rows, 1, context
        self._batch_s, self._batch_distance = duration, abs(error)
        self._batch_expected, self._batch_usual = expected, usual

    def _finish_batch(self) -> None:
        """Correct the coefficients by the mean of the steps in the batch."""
        number = self._batch_steps
        if not number:
            return
        rows, context, seconds, kind = self._batch_rows, self._batch_context, self._batch_s, self._decodes
        self._batch_steps = 0
        self.plain_age = 0
        kind.usual(self._batch_distance / self._batch_expected / number, number)
        column = rows, 0, context / number
        expected = self._line.expected_s(column)
        self._lasting += number / _PASSING_STEPS * (1.0 - self._lasting)
        noise = _noise(kind) * expected
        self._line.correct(column, seconds / number - expected, noise / sqrt(number), number)

    def _update(self, kind: _Kind, column: Column, expected: float, duration: float) -> None:
        """Correct the coefficients by the error of one step. A surprise counts less."""
        self._bounds_left = 0
        line, noise, error = self._line, _noise(kind) * expected, duration - expected
        kind.measured(duration / expected if expected > 0 else 1.0)
        self._lasting += (1.0 - self._lasting) / _PASSING_STEPS
        most = _MOST_SURPRISE * sqrt(line.variance(column) + noise * noise)
        least = -min(most, _MOST_FALL * expected)
        few = self._decodes.count + self._chunks.count < _KNOWN_STEPS
        if least <= error <= most:
            # While few steps are measured, fast ones count even if others come between: a disturbed step may have set
            # the coefficients, and chunks whose length depends on them may never contradict them twice in a row.
            kind.surprises = min(kind.surprises, 0) if few else 0
        else:
            kind.surprises = max(kind.surprises, 0) + 1 if error > 0 else min(kind.surprises, 0) - 1
            if -_FALLS < kind.surprises < _RISES:
                error = most if error > 0 else least
            else:
                kind.surprises = 0
                if few:
                    line.begin(column, duration)
                else:
                    line.changed(column, duration)
                    self._lasting = min(1.0, self._lasting * expected / duration)
                error, noise = 0.0, _FIRST_NOISE * duration
        line.correct(column, error, noise)


def _noise(kind: _Kind) -> float:
    """Return the assumed noise of a step's time, relative to it."""
    if kind.count < _EARLY_STEPS:
        return _FIRST_NOISE
    return min(max(1.25 * kind.deviation, _LEAST_NOISE), _MOST_NOISE)


def _least_share(kind: _Kind, doubt: float) -> float:
    """Return the share of the expected time that nearly all steps of a kind exceed."""
    return max(0.0, 1.0 - 4.0 * kind.deviation - 2.0 * doubt)
