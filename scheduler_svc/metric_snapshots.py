"""Computes the metrics that front ends request, in several turns of the scheduling loop.

A scrape of any process returns the metrics of the whole service. The front end that is scraped requests them from the
scheduler. With many workers, computing them takes tens of milliseconds, for which no worker should wait for its plan.
Each turn of the loop therefore computes metrics for at most `SLICE_S`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.frontend.hub import FrontendHub

SLICE_S = 0.002
"""Maximum time per turn, in seconds."""


class _Snapshot(NamedTuple):
    """A request whose metrics are being computed."""

    peer: Peer
    request: int
    rest: Iterator[link_pb2.MetricFamily | None]
    """The families that are not computed yet, with None between the parts of long families."""
    found: list[link_pb2.MetricFamily]


class MetricSnapshots:
    """The requests of front ends for metrics, oldest first."""

    def __init__(self, frontends: FrontendHub, families: Callable[[], Iterator[link_pb2.MetricFamily | None]]) -> None:
        """Start without requests.

        Args:
            frontends: contains the metrics of the front ends, and receives the replies.
            families: returns the scheduler's own metrics, with None between the parts of long families.
        """
        self._frontends = frontends
        self._families = families
        self._pending: deque[_Snapshot] = deque()

    def __len__(self) -> int:
        """Return the number of pending requests."""
        return len(self._pending)

    def add(self, peer: Peer, request: int) -> None:
        """Add the request with this number from a front end."""
        self._pending.append(_Snapshot(peer, request, self._families(), []))

    def proceed(self, now: float) -> bool:
        """Compute metrics until `SLICE_S` after `now`, and reply to complete requests; return whether some are left."""
        while self._pending:
            snapshot = self._pending[0]
            for family in snapshot.rest:
                if family is not None:
                    snapshot.found.append(family)
                if time.monotonic() - now > SLICE_S:
                    return True
            self._pending.popleft()
            families = [*snapshot.found, *self._frontends.families()]
            self._frontends.outgoing(snapshot.peer).set_snapshot(snapshot.request, families)
        return False
