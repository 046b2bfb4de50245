"""Limits of a step: rows, tokens, plans in flight, chunk lengths."""

import numpy as np

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from records.rules.model_worker import ModelWorker
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.workers.chunks import FIRST_CHUNKS

_LARGE_CHUNK = FIRST_CHUNKS // 2
"""Prompt tokens in a step from which the core learns a worker's speed, regardless of earlier observations."""
_LARGE_CHUNKS = 4
"""Number of such steps after which the core must know the speed."""
_UNCERTAINTY = 8
"""Factor by which a step may exceed its target, because durations vary by up to three times and faults delay
results.
"""


class StepLimits(Promise):
    """No step exceeds the limits on rows, tokens, tokens per prompt, and plans in flight."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        config, model = self.config, epoch.model
        num_rows, most_rows = len(model.rows), self._most_rows(model)
        if num_rows > most_rows:
            raise ViolationError("limit.rows", f"{num_rows} rows of at most {most_rows}")
        if num_rows == most_rows:
            self.seen(Limit.ROWS)
        most_tokens = most_tokens_of(self, model)
        num_drafts = drafts_of(model)
        if plan.num_tokens + num_drafts > most_tokens:
            what = f"{plan.num_tokens} tokens and {num_drafts} drafts of at most {most_tokens}"
            raise ViolationError("limit.tokens", what)
        if plan.num_tokens == most_tokens:
            self.seen(Limit.TOKENS)
        if len(epoch.in_flight) > config.max_plans_in_flight:
            raise ViolationError("limit.in_flight", f"{len(epoch.in_flight)} plans in flight")
        if len(epoch.in_flight) == config.max_plans_in_flight:
            self.seen(Limit.IN_FLIGHT)
        longest = config.long_prefill_token_threshold
        if longest and len(plan.chunk_lengths):
            if plan.chunk_lengths.max() > longest:
                raise ViolationError("limit.chunk", f"chunk of {plan.chunk_lengths.max()}")
            if plan.chunk_lengths.max() == longest:
                self.seen(Limit.CHUNK)
        if len(plan.holds):
            self.seen(Limit.CREDIT)
        if plan.swap_outs:
            self.seen(Limit.SWAPPED_OUT)
        if plan.swap_ins:
            self.seen(Limit.SWAPPED_IN)
        leaves = len(plan.leaves)
        for copy in plan.swap_outs:
            if not leaves:  # Otherwise the copy may be that of a preempted request.
                self.seen(Limit.MOVED_OUT)
            given = np.concatenate((plan.append_blocks, *(each.blocks for each in plan.admissions)))
            if np.isin(copy.sources, given).any():
                self.seen(Limit.TAKEN_AFTER_COPY)
        first_blocks = {each.blocks.item(0) for each in plan.admissions if each.num_computed_tokens}
        for copy in plan.swap_ins:
            if copy.targets.item(0) not in first_blocks:
                self.seen(Limit.MOVED_BACK)
            if not any(copy.targets[-1] in each.blocks for each in plan.admissions):
                self.seen(Limit.MOVED_BACK_IN_PARTS)

    def _most_rows(self, model: ModelWorker) -> int:
        batching = self.config.batching
        most = min(self.config.max_num_seqs, model.max_rows)
        return most if batching.mode == "continuous" else min(most, batching.max_batch_size)


class AttentionIsCounted(Promise):
    """A chunk is charged for its tokens and for its attention.

    One token is always allowed, even if the budget that is left is smaller than its cost.
    """

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        break_even = epoch.model.break_even_context
        if not break_even:
            return
        left = (most_tokens_of(self, epoch.model) - plan.num_decodes) * break_even
        for index, length in zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True):
            if left <= 0:
                raise ViolationError("limit.attention", f"a chunk for row {index} in a step that is full")
            left -= length * (break_even + epoch.model.rows[index].computed - length)
            if left < 0:
                self.seen(Limit.ATTENTION)
                if length > 1:
                    raise ViolationError("limit.attention", f"chunk of {length} for row {index}")


class TargetIsKept(Promise):
    """Chunks do not make a step with decode rows much longer than its target, once the worker's speed is known.

    Steps without chunks may exceed the target. In that case chunks may double the time. Workers that report a
    break-even context are not checked: the core expects more time for tokens after a long context, but in the
    simulation a token's time does not depend on its context.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._plans: dict[Epoch, int] = {}
        """Plans since the last large chunk needed to learn the speed; negative while large chunks are missing."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        target_s = self.config.itl_target_s
        if not target_s or epoch.model.break_even_context:
            return
        count = self._plans.get(epoch, -_LARGE_CHUNKS)
        num_prefill = plan.num_tokens - plan.num_decodes
        self._plans[epoch] = count + 1 if count >= 0 or num_prefill >= _LARGE_CHUNK else count
        if not plan.num_decodes or num_prefill < 2:
            return
        if num_prefill < most_tokens_of(self, epoch.model) - plan.num_decodes:
            row = epoch.model.rows[plan.chunk_rows[-1]]
            if row.computed < row.num_admitted:
                self.seen(Limit.TARGET)
        pace = self.world.scenario.pace
        decode_s = pace.step + pace.per_token * plan.num_decodes + 2 * pace.latency + pace.turn
        expected_s = pace.step + pace.per_token * plan.num_tokens
        if count > self.config.max_plans_in_flight and expected_s > _UNCERTAINTY * max(target_s, 2 * decode_s):
            what = f"{num_prefill} prompt tokens make step {plan.step} {expected_s / target_s:.0f} times its target"
            raise ViolationError("limit.target", what)


def drafts_of(model: ModelWorker) -> int:
    """Return the maximum number of drafts in the worker's newest step."""
    return sum(row.draft_limit for row in model.step_rows)


def most_tokens_of(promise: Promise, model: ModelWorker) -> int:
    """Return the maximum number of tokens in a step on the worker."""
    return min(promise.config.max_num_batched_tokens, model.max_tokens_per_step)
