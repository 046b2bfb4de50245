"""How long a chunk of a prompt may be, so that the steps of a long prompt take equally long.

The token budget of a step counts products with the weights, the same for every token. Attention comes on top, and the
further a prompt has got the more of it: with chunks of one length the last steps of a long prompt are the longest, and
readers of other rows wait for them. So a token counts for more by what its context costs (chunks that shrink with the
context: Medha, arXiv 2409.17264). *Break-even* is the context at which attention costs as much as the products; the
worker tells it of its model, 0 where attention does not grow.
"""


def longest_chunk(budget: int, context: int, break_even: int) -> int:
    """Most tokens after `context` others that `budget` (at least 1) allows; never none: the prompt must get on."""
    return max(1, budget * break_even // (break_even + context)) if break_even else budget


def chunk_cost(chunk: int, context: int, break_even: int) -> int:
    """What `chunk` tokens after `context` others take of a budget."""
    return -(-chunk * (break_even + context) // break_even) if break_even else chunk
