"""Chunk lengths such that all steps of a long prompt take equally long.

The matrix products cost the same for every token, but attention costs more as the context grows. With chunks of equal
length, the last steps of a long prompt would take longest and delay the other rows. The token budget therefore also
charges a token for its context, and chunks shrink as the context grows (Medha, arXiv 2409.17264). *Break-even* is the
context at which attention costs as much as the products. The worker reports it for its model, or 0 if the cost of
attention does not grow.

A step with a chunk takes longer than a decode step, which increases the decode rows' ITL. Small chunks keep the ITL
short. Large chunks yield more tokens per second, so prompts finish sooner. A step therefore has a target time, and its
chunks are as long as this target permits according to the worker's `cost_model`.
"""

from scheduler_svc.core.workers.cost_model import CostModel, StepShape

FIRST_CHUNKS = 128
"""Budget tokens of a step's chunks before the first measurement, enough for a useful measurement."""
PREFILL_FACTOR = 2.0
"""Factor on the target for a step without decode rows. Such a step delays no token, but arriving requests wait for its
end.
"""

PACE_S = 0.048
"""Target time in seconds for a step with chunks and decode rows that keeps the readers' pace of 50 ms per token.

It is slightly shorter because the expected time is uncertain.
"""
FIXED_SHARE = 1 / 32
"""Share of the fixed time in a step that does not keep the pace. Longer steps would hardly compute more per second."""
DELAY_PER_READER_S = 12.0
"""Delay of all waiting prompts together that keeping the pace is worth for each reader, in seconds."""
_RETURN = 4
"""The pace is kept again when the delay has fallen to this fraction of its bound, so the two modes alternate slowly."""

_LEAST_SHARE = 0.25
"""Minimum fraction of the expected time of a step without chunks that is counted, regardless of its uncertainty."""


def chunk_budget(costs: CostModel, target_s: float, shape: StepShape) -> int | None:
    """Return the maximum budget tokens for a step's chunks, at least 1; None for no limit.

    Args:
        costs: those of the worker.
        target_s: target time of a step with decode rows, s; 0 for none.
        shape: the step without chunks.
    """
    if not target_s:
        return None
    if not costs.is_measured:
        return FIRST_CHUNKS
    token_s = costs.cautious_prompt_token_s
    if token_s <= 0:
        return None
    without = costs.expected_s(shape)
    target_s = target_s if shape.rows else PREFILL_FACTOR * target_s
    if target_s < 2.0 * without:
        # As long as all measured chunks had the same size, the fixed time cannot be separated.
        without *= max(_LEAST_SHARE, 1.0 - costs.uncertainty(shape))
    return affordable_tokens(target_s, without, token_s)


class Pace:
    """Whether a worker's steps keep the pace of the readers, or compute prompts as fast as possible.

    Short steps spend a larger fraction of their time on the fixed part, so waiting prompts are computed later. The pace
    is kept until this delays all prompts together by more than `DELAY_PER_READER_S` per decode row. Then steps are as
    long as the target permits. There is no middle way: a slightly longer step already misses every reader's time per
    token, and computes hardly more tokens.
    """

    def __init__(self) -> None:
        self._is_kept = True

    def chunk_budget(
        self, costs: CostModel, target_s: float, shape: StepShape, num_prompts: int, num_tokens: int
    ) -> int | None:
        """Return the maximum budget tokens for a step's chunks, at least 1; None for no limit.

        Args:
            costs: those of the worker.
            target_s: maximum target time of a step with decode rows, s; 0 for none.
            shape: the step without chunks.
            num_prompts: started and waiting prompts.
            num_tokens: their uncached tokens.
        """
        if not (target_s and shape.rows and costs.is_measured):
            return chunk_budget(costs, target_s, shape)
        paced = chunk_budget(costs, min(target_s, PACE_S), shape)
        full = chunk_budget(costs, min(target_s, max(PACE_S, costs.fixed_s / FIXED_SHARE)), shape)
        if paced is None or full is None:
            return None
        last_s = num_tokens * costs.fixed_s * (1 / paced - 1 / full)  # The delay of the last prompt.
        bound_s = DELAY_PER_READER_S * shape.rows
        self._is_kept = num_prompts * last_s / 2 <= (bound_s if self._is_kept else bound_s / _RETURN)
        return paced if self._is_kept else max(paced, full)


def affordable_tokens(target_s: float, decode_s: float, token_s: float) -> int:
    """Return how many budget tokens fit into the step's time, at least 1.

    The step may take `target_s`, or twice the time of its decode rows if this is longer, so that prompts get at least
    half of the worker's time.

    Args:
        target_s: longest time that the step should take.
        decode_s: time of the step without chunks.
        token_s: time that each budget token adds.
    """
    return max(1, int((max(target_s, 2 * decode_s) - decode_s) / token_s))


def longest_chunk(budget: int, context: int, break_even: int) -> int:
    """Return the maximum number of tokens that `budget` pays for after `context` other tokens; may be 0."""
    return budget * break_even // (break_even + context) if break_even else budget


def chunk_cost(chunk: int, context: int, break_even: int) -> int:
    """Return the budget cost of `chunk` tokens after `context` others."""
    return -(-chunk * (break_even + context) // break_even) if break_even else chunk
