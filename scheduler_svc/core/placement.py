"""On which worker a waiting request runs.

Workers take requests from one queue when their next plan is due. With several of them, a worker leaves a request to
another one that would do less work for it: the cost of a worker is the tokens it has still to compute before it could
finish the request's prompt, that is, the part of the prompt that is not in its prefix cache, the prompts it is busy
with, and `DECODE_COST` for every running request. So a cached prefix draws requests to the worker that has it, until
its backlog outweighs what the prefix saves: that bounds hot spots (the cost model of Preble, ICLR 2025, in tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.partial_blocks import PartialMatch
from scheduler_svc.core.request import Request
from scheduler_svc.core.swapping import SwappedKV
from scheduler_svc.core.worker import Worker

DECODE_COST = 32
"""What a running request slows a prompt down by, in prompt tokens."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a request finds on a worker."""

    cached: IndexArray
    """Blocks of its prefix that are there already."""
    num_new: int
    """Blocks to take beside them."""
    partial: PartialMatch | None = None
    """A block to be copied to the first of the new ones."""
    swapped: SwappedKV | None = None
    """Its KV in the worker's host memory, to be copied to the first of the new blocks."""


def find_room(worker: Worker, request: Request) -> Room | None:
    """Where the request's KV would go on this worker, or None when it does not fit now."""
    swapped = worker.swapped_here(request)
    cached, partial = (NO_INDICES, None) if swapped is not None else worker.match(request)
    block_size = worker.rows.block_size
    num_new = -(-len(request.tokens) // block_size) - len(cached)
    limit = min(request.limit, worker.max_model_len)
    # Cached blocks that nobody holds are available until they are shared, or copied from.
    num_available = worker.pool.num_available - worker.pool.count_idle(cached)
    num_copied = 0 if partial is None else worker.pool.count_idle(np.array([partial.block], np.intp))

    def fits(num_available: int) -> bool:
        return worker.capacity.admits(
            worker.rows,
            num_new=num_new,
            worst_blocks=-(-(limit - 1) // block_size),
            num_available=num_available,
        )

    if fits(num_available - num_copied):
        return Room(cached, num_new, partial, swapped)
    # What is worth a copy is not worth waiting for memory.
    return Room(cached, num_new) if num_copied and fits(num_available) else None


class Placement:
    """Shares the queue out among workers, for one worker's admissions.

    It goes through the queue in order and remembers what it has left to others, so that one plan takes its whole share
    of a burst, not one request.
    """

    def __init__(self, worker: Worker, fleet: Sequence[Worker], max_num_seqs: int) -> None:
        """For the admissions of `worker`, one of `fleet`, with at most `max_num_seqs` rows in use per worker."""
        self._worker = worker
        self._others = {
            other: min(max_num_seqs, other.rows.max_rows) - other.rows.num_running
            for other in fleet
            if other is not worker and not other.draining
        }
        """Rows that each other worker has left."""
        self._promised = dict.fromkeys([worker, *self._others], 0)
        """Tokens of work that were left to each."""

    def is_mine(self, request: Request) -> bool:
        """Whether no other worker that could take the request now would do less work for it."""
        mine = self._cost(self._worker, request)
        cheaper = [
            (cost, other)
            for other, rows in self._others.items()
            if rows > 0 and (cost := self._cost(other, request)) < mine and find_room(other, request) is not None
        ]
        if not cheaper:
            return True
        cost, other = min(cheaper, key=lambda each: each[0])
        self._others[other] -= 1
        self._promised[other] += len(request.tokens) - other.cached_tokens(request) + DECODE_COST
        return False

    def _cost(self, worker: Worker, request: Request) -> int:
        uncached = len(request.tokens) - worker.cached_tokens(request)
        backlog = worker.prefill_backlog() + DECODE_COST * worker.rows.num_running
        return uncached + backlog + self._promised[worker]
