"""Timeouts: deadlines that have passed, clients that do not read, and requests without a worker.

Timeouts are checked a few times per second instead of in every step. This module only finds the requests; the registry
ends them.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.requests.request import Request, RequestKey, RequestState
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.rows import DECODE


class Overdue(NamedTuple):
    """A request whose deadline has passed, with the end reason and the message for its client."""

    request: Request
    reason: EndReason
    message: str


class Timeouts:
    """The timeouts of one core's live requests."""

    def __init__(self, config: CoreConfig, fleet: Fleet, requests: Mapping[RequestKey, Request]) -> None:
        """Start without timeouts; `requests` is a live view of the registry's requests."""
        self._config = config
        self._fleet = fleet
        self._requests = requests
        self._deadlines: list[tuple[float, int, RequestKey]] = []
        self._stalling: dict[RequestKey, Request] = {}
        """Requests without credit at the last check; some may have credit again."""

    def watch_deadline(self, request: Request) -> None:
        """Watch the request's deadline, if it has one."""
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, request.sequence, request.key))
        self._drop_ended()

    def watch_reader(self, request: Request, now: float) -> None:
        """Watch a request without credit. It ends if its client does not read for too long."""
        if request.starved_since is None:
            request.starved_since = now
        self._stalling[request.key] = request

    def overdue(self, waiting: Iterable[Request], stranded: Iterable[Request], now: float) -> Iterator[Overdue]:
        """Yield the requests to end. The caller must end each request before it requests the next one.

        Args:
            waiting: requests that wait for a worker and have credit.
            stranded: requests that no worker of the fleet serves.
            now: the time, s.
        """
        yield from self._late(now)
        yield from self._unserved(waiting, now)
        yield from self._stranded(stranded, now)
        yield from self._stalled(now)

    def _drop_ended(self) -> None:
        """Drop the deadlines of ended requests if there are many. A client may have set them years ahead."""
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._requests]
            heapq.heapify(self._deadlines)

    def _late(self, now: float) -> Iterator[Overdue]:
        self._drop_ended()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.sequence == sequence:
                yield Overdue(request, EndReason.DEADLINE, "the deadline passed before the answer was complete")

    def _unserved(self, waiting: Iterable[Request], now: float) -> Iterator[Overdue]:
        empty_since = self._fleet.empty_since
        if empty_since is None or now - empty_since <= self._config.worker_wait_s:
            return
        message = f"no worker: none was available for {self._config.worker_wait_s:g} s; try again later"
        for request in list(waiting):
            if now - max(request.arrival, empty_since) > self._config.worker_wait_s:
                yield Overdue(request, EndReason.NO_WORKER, message)

    def _stranded(self, stranded: Iterable[Request], now: float) -> Iterator[Overdue]:
        longest = self._config.worker_wait_s
        message = f"no worker: none that serves this model and length was available for {longest:g} s; try again later"
        for request in list(stranded):
            if now - request.stranded_since > longest:
                yield Overdue(request, EndReason.NO_WORKER, message)

    def _stalled(self, now: float) -> Iterator[Overdue]:
        for worker in self._fleet:
            # While a row has no credit, every plan for its worker sets this flag again.
            if not worker.starves:
                continue
            worker.starves = False
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
                yield Overdue(
                    request, EndReason.STALLED, f"reader: it took no output for {patience:g} s; read the stream faster"
                )
