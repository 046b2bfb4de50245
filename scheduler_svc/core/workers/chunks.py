"""Chunk lengths such that all steps of a long prompt take equally long.

The products with the weights cost the same for every token, but the cost of attention grows with the context. With
chunks of equal length, the last steps of a long prompt would take longest and delay the other rows. The token budget
therefore also charges a token for its context, and chunks shrink as the context grows (Medha, arXiv 2409.17264).
*Break-even* is the context at which attention costs as much as the products. The worker reports it for its model, 0 if
the cost of attention does not grow.

A step with a chunk takes longer than a decode step, which increases the ITL of the decode rows. Small chunks keep the
ITL short. With large chunks, more tokens per second are computed, so prompts finish sooner. A step therefore has a
target time, and its chunks are as long as this target allows by the worker's `cost_model`.
"""

from scheduler_svc.core.workers.cost_model import CostModel, StepShape

FIRST_CHUNKS = 128
"""Budget tokens of a step's chunks before the first measurement, enough for a useful measurement."""
PREFILL_FACTOR = 2.0
"""Factor on the target for a step without decode rows. Such a step delays no token, but arriving requests wait for its
end.
"""

PACE_S = 0.04
"""Target time in seconds for a step with chunks and decode rows while few prompt tokens wait: 25 tokens per second and
stream.
"""
STEPS_TO_DRAIN = 192
"""Number of steps in which the started and waiting prompts should be computed, if the target allows it.

The more prompt tokens wait, the longer the steps are, so a busy worker loses no throughput through short chunks.
"""

_LEAST_SHARE = 0.25
"""Minimum share of the expected time of a step without chunks that is counted, regardless of its uncertainty."""


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
        # As long as all measured steps had chunks of the same size, the fixed time is not known separately.
        without *= max(_LEAST_SHARE, 1.0 - costs.uncertainty(shape))
    return affordable_tokens(target_s, without, token_s)


def affordable_tokens(target_s: float, decode_s: float, token_s: float) -> int:
    """Return how many budget tokens fit into the step's time, at least 1.

    The step may take `target_s`, or, if this is longer, twice the time of its decode rows, so that prompts get at least
    half of the worker's time.

    Args:
        target_s: longest time that the step should take.
        decode_s: time of the step without chunks.
        token_s: time that each budget token adds.
    """
    return max(1, int((max(target_s, 2 * decode_s) - decode_s) / token_s))


def longest_chunk(budget: int, context: int, break_even: int) -> int:
    """Return the maximum number of tokens that `budget` pays for after `context` others; it may be 0."""
    return budget * break_even // (break_even + context) if break_even else budget


def chunk_cost(chunk: int, context: int, break_even: int) -> int:
    """Return the budget cost of `chunk` tokens after `context` others."""
    return -(-chunk * (break_even + context) // break_even) if break_even else chunk
