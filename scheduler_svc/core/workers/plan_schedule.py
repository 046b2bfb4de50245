"""Plan schedule: when each worker's next plan is due.

A worker with work is due immediately, or shortly before its current step ends (see `plan_timing`). The time to find the
due workers is proportional to their number, not to the size of the fleet.
"""

import heapq
from collections.abc import Iterable
from itertools import chain

from scheduler_svc.core.workers.plan_timing import EARLY_S
from scheduler_svc.core.workers.worker import Worker


class PlanSchedule:
    """One core's workers, ordered by the time of their next plan."""

    def __init__(self, max_plans_in_flight: int, *, collects: bool) -> None:
        """Start without workers; `collects` says whether workers collect batches."""
        self._max_in_flight = max_plans_in_flight
        self._collects = collects
        self._due: dict[Worker, float] = {}
        """Workers whose plan will be due, with the time."""
        self._heap: list[tuple[float, int, Worker]] = []
        """A heap of (time, entry order, worker); an entry whose time differs from `_due` is stale."""
        self._num_entries = 0
        self._ready: dict[Worker, None] = {}
        """Workers whose plan is due."""
        self._idle: dict[Worker, None] = {}
        """Workers whose plan is due but that have nothing to do."""

    def update(self, worker: Worker) -> None:
        """Update a worker that has joined, or whose steps in flight have changed."""
        self._ready.pop(worker, None)
        self._idle.pop(worker, None)
        due = worker.plan_due(self._max_in_flight)
        if due is None:
            self._due.pop(worker, None)
            return
        self._due[worker] = due
        self._num_entries += 1
        heapq.heappush(self._heap, (due, self._num_entries, worker))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def remove(self, worker: Worker) -> None:
        self._due.pop(worker, None)
        self._ready.pop(worker, None)
        self._idle.pop(worker, None)

    def due(self, now: float, *, for_any: bool, for_each: Iterable[Worker]) -> list[Worker]:
        """Return the workers whose plan is due, or nearly due and worth sending together; longest due first.

        Workers without work for which requests wait come first. Otherwise, if there is not enough time for all plans,
        the plans of busy workers would come first in every turn.

        Args:
            now: the time, s.
            for_any: whether requests wait that any worker without work may take.
            for_each: the workers that may take a request in any case.
        """
        self._advance(now + EARLY_S)
        for worker in [worker for worker in self._ready if not (worker.has_work or worker.in_flight)]:
            del self._ready[worker]
            self._idle[worker] = None
        awaited = dict.fromkeys(worker for worker in for_each if worker in self._idle)
        others = (worker for worker in self._idle if worker not in awaited) if for_any else ()
        return [*awaited, *self._ready, *others]

    def next_due(self, now: float) -> float | None:
        """Return the next time after `now` at which a plan becomes due, or None."""
        self._advance(now)
        times = [self._heap[0][0]] if self._heap else []
        if self._collects:
            for worker in chain(self._ready, self._idle):
                if (opens_at := worker.gate.opens_at) is not None and opens_at > now:
                    times.append(opens_at)
        return min(times, default=None)

    def _advance(self, now: float) -> None:
        """Move workers whose plan is due out of the heap, until its first entry lies in the future."""
        heap = self._heap
        while heap:
            due, _, worker = heap[0]
            is_void = self._due.get(worker) != due
            if not is_void and due > now:
                return
            heapq.heappop(heap)
            if not is_void:
                del self._due[worker]
                self._ready[worker] = None
