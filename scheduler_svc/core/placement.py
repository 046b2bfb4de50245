"""On which worker a waiting request runs.

Workers take requests from one queue when their next plan is due. With several of them, a worker leaves a request to
another one that would do less work for it: the cost of a worker is the tokens it has still to compute before it could
finish the request's prompt, that is, the part of the prompt that is not in its prefix cache, the prompts it is busy
with, and `DECODE_COST` for every running request. So a cached prefix draws requests to the worker that has it, until
its backlog outweighs what the prefix saves: that bounds hot spots (the cost model of Preble, ICLR 2025, in tokens).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from scheduler_svc.core.arrays import IndexArray
from scheduler_svc.core.partial_blocks import PartialMatch
from scheduler_svc.core.request import Request
from scheduler_svc.core.swapping import SwappedKV
from scheduler_svc.core.worker import Match, Worker
from shared.prefix_keys import KEY_BYTES, BlockKey

DECODE_COST = 32
"""What a running request slows a prompt down by, in prompt tokens."""


@dataclass(slots=True)
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


def find_room(worker: Worker, request: Request, match: Match) -> Room | None:
    """Where the request's KV would go on this worker, or None when it does not fit now."""
    cached, partial = match.blocks, match.partial
    block_size = worker.rows.block_size
    num_new = -(-len(request.tokens) // block_size) - len(cached)
    worst_blocks = -(-(min(request.limit, worker.max_model_len) - 1) // block_size)
    # Cached blocks that nobody holds are available until they are shared, or copied from.
    num_available = worker.pool.num_available - worker.pool.count_idle(cached)
    num_copied = 0 if partial is None else worker.pool.count_idle(np.array([partial.block], np.intp))
    fits = partial_fits = worker.capacity.admits(
        worker.rows, num_new=num_new, worst_blocks=worst_blocks, num_available=num_available
    )
    if fits and num_copied:
        partial_fits = worker.capacity.admits(
            worker.rows, num_new=num_new, worst_blocks=worst_blocks, num_available=num_available - num_copied
        )
    if partial_fits:
        return Room(cached, num_new, partial, match.swapped)
    # What is worth a copy is not worth waiting for memory.
    return Room(cached, num_new) if fits else None


class Placement:
    """Shares the queue out among workers, for one worker's admissions.

    It goes through the queue in order and remembers what it has left to others, so that one plan takes its whole share
    of a burst, not one request. Of the workers that have nothing of a request's prefix, which are nearly all of them,
    only the least loaded matters, so a request costs little however many workers there are.
    """

    def __init__(self, worker: Worker, fleet: Sequence[Worker], max_num_seqs: int) -> None:
        """For the admissions of `worker`, one of `fleet`, with at most `max_num_seqs` rows in use per worker."""
        self._worker = worker
        self._rows_left: dict[Worker, int] = {
            other: rows
            for other in fleet
            if other is not worker
            and not other.draining
            and (rows := min(max_num_seqs, other.rows.max_rows) - other.rows.num_running) > 0
        }
        self._loads = {other: _load(other) for other in self._rows_left}
        """Work of each other worker, with what was left to it in this plan, in tokens."""
        self._by_load = [(load, index, other) for index, (other, load) in enumerate(self._loads.items())]
        """A heap. Loads in it may be out of date, which means too small."""
        heapify(self._by_load)
        self._first_keys: dict[int, list[tuple[Container[BlockKey], Worker]]] = {}
        """By block size: what each cache begins with."""
        for other in self._rows_left:
            self._first_keys.setdefault(other.rows.block_size, []).append((other.pool.cache.first_keys, other))

    def is_mine(self, request: Request) -> bool:
        """Whether no other worker that could take the request now would do less work for it."""
        num_tokens = len(request.tokens)
        cost, chosen = _load(self._worker) + num_tokens - self._worker.cached_tokens(request), None
        for other in self._with_prefix(request):
            other_cost = self._loads[other] + num_tokens - other.cached_tokens(request)
            if other_cost < cost and self._rows_left[other] and _has_room(other, request):
                cost, chosen = other_cost, other
        chosen = self._least_loaded(request, cost - num_tokens) or chosen
        if chosen is None:
            return True
        self._rows_left[chosen] -= 1
        self._loads[chosen] += num_tokens - chosen.cached_tokens(request) + DECODE_COST
        return False

    def _with_prefix(self, request: Request) -> list[Worker]:
        """The other workers that have a block of the request's prefix, or its KV; parts of a block weigh too little."""
        found = []
        for members in self._first_keys.values():
            key = members[0][1].shareable_keys(request)[:KEY_BYTES]
            found += [other for first_keys, other in members if key in first_keys]
        if request.swapped is not None:
            found += [other for other in self._rows_left if other.swapped_here(request) is not None]
        return found

    def _least_loaded(self, request: Request, bound: int) -> Worker | None:
        """The worker with the least load, if that is below `bound`, among those that have room."""
        heap, without_room = self._by_load, []
        found = None
        while heap and heap[0][0] < bound:
            load, index, other = heap[0]
            if not self._rows_left[other]:
                heappop(heap)
            elif load != self._loads[other]:
                heapreplace(heap, (self._loads[other], index, other))
            elif not _has_room(other, request):
                without_room.append(heappop(heap))
            else:
                found = other
                break
        for entry in without_room:
            heappush(heap, entry)
        return found


def _has_room(worker: Worker, request: Request) -> bool:
    return find_room(worker, request, worker.match(request)) is not None


def _load(worker: Worker) -> int:
    return worker.prefill_backlog() + DECODE_COST * worker.rows.num_running
