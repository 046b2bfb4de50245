"""The waiting queue: requests that are not running, first come, first served.

A preempted request keeps its place in the order of arrival, so it is ahead of everything that came later. Requests
that end while they wait are dropped when they surface; when half the heap is such leftovers it is rebuilt, so that
memory follows the number of live requests.
"""

import heapq

from scheduler_svc.core.request import Request, RequestState


class WaitingQueue:
    """Requests in order of arrival; each at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Request]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    def push(self, request: Request) -> None:
        """Adds a request in state WAITING."""
        request.queued = True
        heapq.heappush(self._heap, (request.sequence, request))

    def head(self) -> Request | None:
        """The request that is next, or None."""
        while self._heap and self._heap[0][1].state is RequestState.FINISHED:
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Takes the head out."""
        request = self.head()
        assert request is not None
        heapq.heappop(self._heap)
        request.queued = False
        return request

    def forget(self, request: Request) -> None:
        """A request in the queue has finished."""
        request.queued = False
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].state is not RequestState.FINISHED]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def requests(self) -> list[Request]:
        """All waiting requests, in no particular order."""
        return [request for _, request in self._heap if request.state is not RequestState.FINISHED]
