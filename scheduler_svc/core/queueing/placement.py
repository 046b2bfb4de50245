"""Placement: on which worker a waiting request runs.

A worker takes requests from the backlog when its next plan is made. If another worker has room too and a lower cost,
the request is assigned to that worker. A worker's cost is a number of prompt tokens:

* the part of the prompt that is not in its prefix cache,
* the prompts under way there,
* `DECODE_COST` for every running request.

Requests therefore go to the worker with their cached prefix until its additional load exceeds the saving, which limits
hot spots (Preble's cost model, ICLR 2025, in tokens). A request that an earlier scheduler ran continues on the
worker that has most of its KV, because that scheduler has balanced the loads. If more requests wait than all other
workers have rows, every row will be used, so only prefixes are compared.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from scheduler_svc.core.memory.swapping import SwappedKV
from scheduler_svc.core.memory.window_blocks import WindowRoom
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import Match
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES

DECODE_COST = 512
"""Cost of one running request, in prompt tokens.

A running request lengthens several hundred steps by about the time of one prompt token each. In the arena with 16
devices, a value of 32 packs requests onto few devices, and 2,048 scatters common prefixes.
"""
MAX_ASSIGNED = 4
"""Number of failed assignments after which any worker takes a request."""
_MAX_TRIES = 8
"""Number of least loaded workers that are checked for room."""
NOTHING_CACHED = Match(NO_INDICES)
"""The match for a request with an empty cache."""


@dataclass(slots=True)
class Room:
    """The memory for a request on one worker."""

    cached: IndexArray
    """Cached blocks of its prefix."""
    num_new: int
    """Number of further blocks to take."""
    partial: PartialMatch | None = None
    """A block to copy to the first new one."""
    swapped: SwappedKV | None = None
    """Its KV in the worker's host memory, to copy to the first new blocks."""
    window: WindowRoom | None = None
    """Its blocks for layers with a sliding window; None if the worker has one KV group."""


def find_room(worker: Worker, request: Request, match: Match) -> Room | None:
    """Return the memory for the request's KV on this worker, or None if it does not fit now."""
    cached, partial = match.blocks, match.partial
    block_size = worker.rows.block_size
    num_new = -(-len(request.tokens) // block_size) - len(cached)
    worst_blocks = -(-(worker.limit_of(request) - 1) // block_size)
    # Cached blocks that no row holds count as available until a request shares or copies them.
    num_available = worker.pool.num_available - worker.pool.count_idle(cached)
    if worker.windows is not None:
        return _find_windowed_room(worker, request, match, num_new, worst_blocks, num_available)
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
    # A partial copy saves too little to wait for memory.
    return Room(cached, num_new) if fits else None


def _find_windowed_room(
    worker: Worker, request: Request, match: Match, num_new: int, worst_blocks: int, num_available: int
) -> Room | None:
    """Return the memory on a worker with windows, or None.

    Boundaries need further blocks, so the row has none if the longest sequence would not fit with them alone.

    Args:
        worker: the worker.
        request: the request.
        match: its cached prefix.
        num_new: blocks of the first KV group to take.
        worst_blocks: blocks of that group for its longest possible sequence.
        num_available: blocks that can be taken in addition to the cached ones.
    """
    windows = worker.windows
    assert windows is not None
    tail = windows.present_tail(match.blocks, match.num_blocks)
    num_available -= worker.pool.count_idle(tail)
    num_copied = len(match.host_tail)
    num_tail = len(tail) + num_copied
    num_present = len(match.blocks) + num_new
    longest = max(worst_blocks, num_present)
    first = match.num_blocks if match.swapped is None else windows.first_visible(match.swapped.num_tokens)
    boundaries = worker.publisher.boundaries(request, match)
    for kept in (boundaries, ()) if boundaries else ((),):
        num_taken = windows.num_taken(first, num_present, kept)
        most_taken = windows.num_taken(first, longest, kept)
        if kept and longest + num_tail + most_taken > worker.pool.num_blocks:
            continue
        if worker.capacity.admits(
            worker.rows,
            num_new=num_new + num_copied + num_taken,
            worst_blocks=worst_blocks + num_tail + most_taken,
            num_available=num_available,
        ):
            window = WindowRoom(windows.tail_of(match.blocks), num_taken, most_taken, kept, first)
            return Room(match.blocks, num_new, swapped=match.swapped, window=window)
    return None


class Placement:
    """Loads of the workers that take requests; used only with at least two workers.

    Loads are updated lazily: `changed` marks a worker whose load is recomputed before the next use.
    """

    def __init__(self, backlog: Backlog, directory: PrefixDirectory, max_num_seqs: int) -> None:
        """Start without workers; a worker uses at most `max_num_seqs` rows."""
        self._backlog = backlog
        self._directory = directory
        self._max_num_seqs = max_num_seqs
        self._loads: dict[Worker, int] = {}
        """Work of each worker including assigned requests, tokens."""
        self._assigned: dict[Worker, int] = {}
        """Work assigned to each worker since its last plan, tokens."""
        self._free_rows: dict[Worker, int] = {}
        self._num_free_rows = 0
        """Number of free rows of all workers."""
        self._order: dict[Worker, int] = {}
        """Order in which the workers joined; breaks ties."""
        self._num_joined = 0
        self._by_load: list[tuple[int, int, Worker]] = []
        """A heap of (load, order, worker) for workers with free rows; entries that differ from `_listed` are stale."""
        self._listed: dict[Worker, int] = {}
        """The load of each worker in the heap."""
        self._by_epoch: dict[int, Worker] = {}
        self._by_block_size: dict[int, Worker] = {}
        """One worker per block size, because the same tokens have different keys in blocks of another size."""
        self._changed: dict[Worker, None] = {}
        self._late: set[Worker] = set()
        """Workers whose plan is overdue. No request is assigned to them until the plan is made."""

    @property
    def num_workers(self) -> int:
        """Number of workers that take requests."""
        return len(self._order)

    def set_fleet(self, workers: list[Worker]) -> None:
        """Set the workers that take requests."""
        present = dict.fromkeys(workers)
        for worker in [worker for worker in self._order if worker not in present]:
            del self._order[worker]
            self._assigned.pop(worker, None)
            self._changed.pop(worker, None)
            self._loads.pop(worker, None)
            self._listed.pop(worker, None)
            self._late.discard(worker)
            self._num_free_rows -= self._free_rows.pop(worker, 0)
        for worker in workers:
            if worker not in self._order:
                self._num_joined += 1
                self._order[worker] = self._num_joined
                self._changed[worker] = None
        self._by_epoch = {worker.epoch: worker for worker in workers}
        self._by_block_size = {worker.rows.block_size: worker for worker in workers}

    def changed(self, worker: Worker) -> None:
        """Mark a worker's load as changed."""
        if worker in self._order:
            self._changed[worker] = None

    def planned(self, worker: Worker) -> None:
        """Record that a plan was made for a worker, which has no assigned requests any more."""
        self._assigned.pop(worker, None)
        self._late.discard(worker)
        self.changed(worker)

    def late(self, worker: Worker) -> None:
        """Record that a worker's plan is overdue."""
        self._assigned.pop(worker, None)
        self._late.add(worker)
        self.changed(worker)

    def cost(self, worker: Worker, request: Request) -> int:
        """Return the tokens that a worker has to compute before it can finish the request's prompt."""
        return _load(worker) + len(request.tokens) - worker.prefixes.cached_tokens(request)

    def better_than(self, worker: Worker, load: int, request: Request, num_cached: int) -> Worker | None:
        """Return another worker that has room for the request and would do less work for it, or None.

        Args:
            worker: a worker with room for the request.
            load: its load including the admissions of the plan being made, tokens.
            request: a request that this worker has just taken from the backlog.
            num_cached: number of its tokens cached on this worker.
        """
        self._update()
        num_tokens = len(request.tokens)
        if request.is_returning:
            home = self._with_most(worker, request, num_cached)
            if home is not None:
                if home is worker:
                    return None
                self._assign(home, DECODE_COST)
                return home
        cost, chosen = load + num_tokens - num_cached, None
        for other in self._with_prefix(worker, request):
            match = other.prefixes.match(request)
            other_cost = self._loads[other] + num_tokens - other.prefixes.num_cached(match)
            if other_cost < cost and self._may_take(other, request) and _has_room(other, request, match):
                cost, chosen = other_cost, other
        num_free_rows = self._num_free_rows - self._free_rows.get(worker, 0)
        if self._backlog.num_ready <= num_free_rows:
            least_loaded = self._least_loaded(worker, request, cost - num_tokens)
            if least_loaded is not None:
                cost, chosen = self._loads[least_loaded] + num_tokens, least_loaded
        if chosen is not None:
            self._assign(chosen, cost - self._loads[chosen] + DECODE_COST)
        return chosen

    def home(self, request: Request) -> Worker | None:
        """Return the worker on which a request that an earlier scheduler ran continues; None for any worker."""
        self._update()
        found = None if request.home else self._with_most(None, request, 0)
        if found is not None:
            self._assign(found, DECODE_COST)
        return found

    def _with_most(self, worker: Worker | None, request: Request, num_cached: int) -> Worker | None:
        """Return the worker that has most of a request's KV; None if no worker with room has more than half of it.

        Args:
            worker: a worker with room for the request, if one is known.
            request: a request that an earlier scheduler ran.
            num_cached: the number of its tokens that are cached on this worker.
        """
        most, found = num_cached, worker
        for other in self._with_prefix(worker, request):
            match = other.prefixes.match(request)
            num_found = other.prefixes.num_cached(match)
            if num_found > most and self._may_take(other, request) and _has_room(other, request, match):
                most, found = num_found, other
        return found if 2 * most > len(request.tokens) else None

    def load(self, worker: Worker) -> int:
        """Return the worker's load in tokens."""
        return _load(worker)

    def with_room(self, worker: Worker, request: Request, *, assign: bool = True) -> Worker | None:
        """Return the least loaded other worker that has room for the request and its grammar, or None.

        Args:
            worker: the worker to exclude, which lacks room for the request, or the grammar.
            request: the request, which was taken from the backlog for this worker.
            assign: whether to assign the request to the other worker.
        """
        self._update()
        found = self._least_loaded(worker, request, None)
        if found is not None and assign:
            self._assign(found, len(request.tokens) + DECODE_COST)
        return found

    def _assign(self, worker: Worker, tokens: int) -> None:
        self._assigned[worker] = self._assigned.get(worker, 0) + tokens
        self._free_rows[worker] -= 1
        self._num_free_rows -= 1
        self._loads[worker] += tokens
        self._list(worker)

    def _update(self) -> None:
        for worker in self._changed:
            free = min(self._max_num_seqs, worker.rows.max_rows) - worker.rows.num_running
            free = 0 if worker in self._late else max(0, free - self._backlog.num_assigned(worker))
            self._num_free_rows += free - self._free_rows.get(worker, 0)
            self._free_rows[worker] = free
            self._loads[worker] = _load(worker) + self._assigned.get(worker, 0)
            self._list(worker)
        self._changed.clear()

    def _list(self, worker: Worker) -> None:
        """Put a worker with free rows into the heap, with its present load."""
        load = self._loads[worker]
        if self._free_rows[worker] and self._listed.get(worker) != load:
            self._listed[worker] = load
            heappush(self._by_load, (load, self._order[worker], worker))
            if len(self._by_load) > 64 + 4 * len(self._order):
                self._by_load = [(load, self._order[each], each) for each, load in self._listed.items()]
                heapify(self._by_load)

    def _may_take(self, worker: Worker, request: Request) -> bool:
        return bool(
            self._free_rows[worker]
            and worker.gate.may_open(worker.rows.num_running)
            and self._backlog.can_serve(worker, request)
            and worker.grammars.is_ready(request.grammar_key)
        )

    def _with_prefix(self, worker: Worker | None, request: Request) -> list[Worker]:
        """Return the workers other than `worker` with a full block of the request's prefix or with its swapped KV.

        Partial blocks save too little to count.
        """
        epochs: list[int] = [] if request.swapped is None else [request.swapped.epoch]
        for other in self._by_block_size.values():
            epochs += self._directory.epochs(other.prefixes.shareable_keys(request)[:KEY_BYTES])
        own = None if worker is None else worker.epoch
        return [self._by_epoch[epoch] for epoch in epochs if epoch in self._by_epoch and epoch != own]

    def _least_loaded(self, worker: Worker, request: Request, bound: int | None) -> Worker | None:
        """Return the least loaded other worker that can take the request, if its load is below `bound`.

        Only the first few workers are checked, because if they have no room, other workers rarely have room.
        """
        heap, found = self._by_load, None
        passed: list[tuple[int, int, Worker]] = []
        while heap and (bound is None or heap[0][0] < bound) and len(passed) < _MAX_TRIES:
            load, _, other = heap[0]
            if self._listed.get(other) != load or not self._free_rows[other]:
                heappop(heap)
                if self._listed.get(other) == load:
                    del self._listed[other]
            elif other is not worker and self._may_take(other, request) and _has_room(other, request, NOTHING_CACHED):
                found = other
                break
            else:
                passed.append(heappop(heap))
        for entry in passed:
            heappush(heap, entry)
        return found


def _has_room(worker: Worker, request: Request, match: Match) -> bool:
    return find_room(worker, request, match) is not None


def _load(worker: Worker) -> int:
    return worker.prefill_backlog() + DECODE_COST * worker.rows.num_running
