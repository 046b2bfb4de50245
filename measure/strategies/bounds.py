"""Bounds on the number of steps, from the output lengths. Pure.

A request with L output tokens takes L steps; the first step computes its prompt and its first token. A step computes
one token for each of at most `slots` requests. The bounds assume that all requests arrive at the start.
"""

import heapq
from collections.abc import Sequence


def static_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the steps for batches of `slots` requests in order. Each batch ends with its longest request."""
    return sum(max(lengths[begin : begin + slots]) for begin in range(0, len(lengths), slots))


def continuous_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the steps if the next request, in order, starts as soon as a slot is free."""
    ends = [0] * min(slots, len(lengths))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def fewest_steps(lengths: Sequence[int], slots: int) -> int:
    """Return a lower bound on the steps for any order of these requests."""
    return max(*lengths, -(-sum(lengths) // slots))


def fewest_steps_in_blocks(
    lengths: Sequence[int], slots: int, *, prompt_tokens: int, num_blocks: int, block_size: int
) -> int:
    """Return a lower bound on the steps if the requests also share `num_blocks` KV blocks.

    In the step for its k-th token, a request holds the blocks for its prompt and for the k - 1 previous tokens.
    """
    held = sum(-(-(prompt_tokens + before) // block_size) for length in lengths for before in range(length))
    return max(fewest_steps(lengths, slots), -(-held // num_blocks))


def slots_for(lengths: Sequence[int], steps: int) -> int:
    """Return the fewest slots for which this number of steps is possible."""
    return -(-sum(lengths) // steps)
