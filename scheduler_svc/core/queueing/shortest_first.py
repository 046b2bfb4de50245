"""Waiting requests by their number of tokens, shortest first. Ties are broken by policy order.

A request is in its policy queue at the same time. It is not explicitly removed from this order: an entry is valid only
while the request competes and still has the entry's length and rank. Stale entries are dropped when they reach the top,
or when they make up more than half of the heap.
"""

import heapq
from collections.abc import Callable, Mapping

from scheduler_svc.core.requests.request import Request

_FEW_GONE = 16
"""Number of stale entries tolerated in the heap, because they retain the tokens of ended requests."""
_MAX_SKIPPED = 8
"""Maximum number of requests that are skipped in one search."""
_Entry = tuple[int, float, int, Request]
"""Number of tokens, rank and position in the order of arrival of a request, and the request."""


class ShortestFirst:
    """The competing requests by length. Ties are broken by rank, then by order of arrival."""

    def __init__(self, competing: Mapping[Request, object | None], rank: Callable[[Request], float]) -> None:
        """Start empty.

        Args:
            competing: a live view of the requests that may be found; a request with the value None is currently not
                found.
            rank: returns the rank of a request under the policy.
        """
        self._competing = competing
        self._rank = rank
        self._heap: list[_Entry] = []
        self._places: dict[Request, _Entry] = {}
        """The newest entry of each request."""

    def push(self, request: Request) -> None:
        """Add a request, or put back one."""
        entry = len(request.tokens), self._rank(request), request.sequence, request
        if self._places.get(request) != entry:
            self._places[request] = entry
            heapq.heappush(self._heap, entry)
            self.compact()

    def discard(self, request: Request) -> None:
        """Remove a request that still competes, but not by length."""
        self._places.pop(request, None)

    def first(self, accepts: Callable[[Request], bool]) -> Request | None:
        """Return the shortest request that `accepts` approves, or None. Only a few are checked."""
        skipped: list[_Entry] = []
        found = None
        while self._heap and len(skipped) < _MAX_SKIPPED:
            entry = self._heap[0]
            length, _, _, request = entry
            is_newest = self._places.get(request) == entry
            if self._competing.get(request) is None or not is_newest:
                heapq.heappop(self._heap)
                if is_newest:
                    del self._places[request]
            elif len(request.tokens) != length:
                heapq.heappop(self._heap)  # Steps in flight have added tokens to this request since it was preempted.
                self.push(request)
            elif accepts(request):
                found = request
                break
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def compact(self) -> None:
        """Drop void entries if there are many."""
        if len(self._heap) > _FEW_GONE + 2 * len(self._competing):
            present = {each for each, queue in self._competing.items() if queue is not None}
            self._places = {each: entry for each, entry in self._places.items() if each in present}
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)
