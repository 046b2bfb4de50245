"""Length of a prompt's chunks, such that the steps of a long prompt take equally long.

The token budget of a step counts products with the weights, which are the same for every token. The cost of attention
comes on top and grows with the context. With chunks of equal length, the last steps of a long prompt would take
longest, and the readers of other rows would wait for them.

So a token is charged for its context too, and chunks shrink as the context grows (Medha, arXiv 2409.17264).
*Break-even* is the context at which attention costs as much as the products. The worker reports it for its model, 0 if
the cost of attention does not grow.
"""


def longest_chunk(budget: int, context: int, break_even: int) -> int:
    """Return the most tokens that `budget` (at least 1) pays for after `context` others.

    The result is at least 1, so that the prompt always advances.
    """
    return max(1, budget * break_even // (break_even + context)) if break_even else budget


def chunk_cost(chunk: int, context: int, break_even: int) -> int:
    """Return the budget that `chunk` tokens take after `context` others."""
    return -(-chunk * (break_even + context) // break_even) if break_even else chunk
