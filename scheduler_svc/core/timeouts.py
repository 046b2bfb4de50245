"""Whose time is up: deadlines that pass, readers that take nothing, requests that no worker comes for.

Looked at when time passes, a few times a second, so that no step pays for it. Nothing is ended here.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.records import EndReason
from scheduler_svc.core.request import Request, RequestKey, RequestState
from scheduler_svc.core.rows import DECODE
from scheduler_svc.core.waiting import WaitingQueue


class Overdue(NamedTuple):
    """A request whose time is up, and what its client is told."""

    request: Request
    reason: EndReason
    message: str


class Timeouts:
    """What the live requests of one core wait for, and since when."""

    def __init__(self, config: CoreConfig, fleet: Fleet, requests: Mapping[RequestKey, Request]) -> None:
        """`requests` are the live ones, as whoever ends them has them."""
        self._config = config
        self._fleet = fleet
        self._requests = requests
        self._deadlines: list[tuple[float, int, RequestKey]] = []
        self._stalling: dict[RequestKey, Request] = {}
        """Requests that were seen without credit; some may have got it since."""

    def watch_deadline(self, request: Request) -> None:
        """The request ends when its deadline passes, if it has one."""
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, request.sequence, request.key))
        # Deadlines of requests that have ended stay until they pass, which a client may have set years ahead.
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._requests]
            heapq.heapify(self._deadlines)

    def watch_reader(self, request: Request, now: float) -> None:
        """The request's reader has no room for more; it ends if that stays so for too long."""
        if request.starved_since is None:
            request.starved_since = now
        self._stalling[request.key] = request

    def overdue(self, waiting: WaitingQueue, now: float) -> Iterator[Overdue]:
        """The requests to end, each of them before the next one is asked for.

        Args:
            waiting: who waits for a worker and has credit.
            now: the time.
        """
        yield from self._late(now)
        yield from self._unserved(waiting, now)
        yield from self._stalled(now)

    def _late(self, now: float) -> Iterator[Overdue]:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.sequence == sequence:
                yield Overdue(request, EndReason.DEADLINE, "the deadline passed before the answer was complete")

    def _unserved(self, waiting: WaitingQueue, now: float) -> Iterator[Overdue]:
        empty_since = self._fleet.empty_since
        if empty_since is None:
            return
        message = f"no worker was there for {self._config.worker_wait_s:g} s; try again later"
        for request in waiting.requests():
            if now - max(request.arrival, empty_since) > self._config.worker_wait_s:
                yield Overdue(request, EndReason.NO_WORKER, message)

    def _stalled(self, now: float) -> Iterator[Overdue]:
        for worker in self._fleet:
            rows = worker.rows
            for row in np.flatnonzero((rows.state == DECODE) & (rows.committed >= rows.allowed)).tolist():
                request = rows.requests[row]
                assert request is not None
                if request.starved_since is None:
                    self.watch_reader(request, now)
        patience = self._config.stall_timeout_s
        for key, request in list(self._stalling.items()):
            if request.starved_since is None or request.state is RequestState.FINISHED:
                del self._stalling[key]
            elif 0 < patience < now - request.starved_since:
                yield Overdue(request, EndReason.STALLED, f"the reader took nothing for {patience:g} s")
