"""Chunk lengths for which the steps of a long prompt take equally long.

The token budget of a step counts products with the weights, which are the same for every token. The cost of attention
comes on top and grows with the context. With chunks of equal length, the last steps of a long prompt would take
longest, and the readers of other rows would wait for them.

So a token is charged for its context too, and chunks shrink as the context grows (Medha, arXiv 2409.17264).
*Break-even* is the context at which attention costs as much as the products. The worker reports it for its model, 0 if
the cost of attention does not grow.

A step with a chunk takes longer than one without, and the readers of the decode rows wait for it. Small chunks keep
this gap short. Large chunks compute more tokens per second, so prompts finish sooner. So a step has a target time, and
its chunks are as long as the worker's `cost_model` allows.
"""

from scheduler_svc.core.workers.cost_model import CostModel, StepShape

FIRST_CHUNKS = 128
"""Budget tokens of a step's chunks before the first measurement: enough for a useful one."""
PREFILL_FACTOR = 2.0
"""Factor on the target for a step without decode rows. No reader waits for its next token then, but arriving requests
wait for the step to end.
"""

PACE_S = 0.04
"""Target time in seconds for a step with chunks and decode rows while few prompt tokens wait: readers get 25 tokens per
second.
"""
STEPS_TO_DRAIN = 192
"""Number of steps in which the started and waiting prompts should be computed, if the target allows it.

The more prompt tokens wait, the longer the steps are. So a busy worker loses no throughput to short chunks.
"""

_LEAST_SHARE = 0.25
"""Least counted share of a chunkless step's expected time, however uncertain it is."""


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
        # If all steps had chunks of the same size, the fixed time cannot be separated from the time per token.
        without *= max(_LEAST_SHARE, 1.0 - costs.uncertainty(shape))
    return affordable_tokens(target_s, without, token_s)


def affordable_tokens(target_s: float, decode_s: float, token_s: float) -> int:
    """Return how many budget tokens fit into the step's time, at least 1.

    The step may take `target_s`. Where decode rows alone take more than half of that, it may take twice as long as
    they do, so that prompts get at least half of the worker's time.

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
