"""All connected front ends: their leases, their metrics, and what each is to be told.

The core never waits for a front end. What a socket does not take stays in a backlog, in order. A front end that says
nothing for the length of its lease is lost, and so is one that goes on talking without reading what it is told.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import zmq

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core import events as ev
from scheduler_svc.frontend_link import Outgoing
from shared.logging import get_logger
from shared.sockets import LINK_MAX_MESSAGE, Protect, SendOutcome, bind_router, send_to

MAX_BACKLOG = 64 << 20
"""A front end with a longer backlog is lost, bytes. Tokens alone do not get there, since streams have credit."""

_MAX_REFUSED = 64

log = get_logger()


@dataclass(slots=True)
class _Frontend:
    last_heard: float
    outgoing: Outgoing = field(default_factory=Outgoing)
    pending: bool = False
    """`outgoing` holds something."""
    backlog: deque[tuple[int, bytes]] = field(default_factory=deque)
    """What must be durable before it may be sent, and the frame."""
    backlog_bytes: int = 0
    report: link_pb2.MetricReport = field(default_factory=link_pb2.MetricReport)


class FrontendHub:
    """The ROUTER that front ends connect to, and what is known of each."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        incarnation: int,
        lease_s: float,
        protect: Protect = lambda _socket: None,
    ):
        self.socket = bind_router(context, address, max_message=LINK_MAX_MESSAGE, protect=protect)
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._frontends: dict[ev.Peer, _Frontend] = {}
        self._refused: dict[str, str] = {}
        """Why, by name, for the log."""

    def heard(self, peer: ev.Peer, now: float, *, version: int = 0) -> bool:
        """Notes a sign of life; returns whether the front end is known.

        A hello, which comes with the `version` that is spoken with it, makes it so.
        """
        if version and peer not in self._frontends:
            self._frontends[peer] = _Frontend(now)
            log.info("front end joined", frontend=peer.decode(errors="replace"), protocol_version=version)
        frontend = self._frontends.get(peer)
        if frontend is None:
            return False
        if version:
            self.outgoing(peer).set_version(version)
        frontend.last_heard = now
        return True

    def send_unknown(self, peer: ev.Peer) -> None:
        """Tells a stranger to say hello and to submit again."""
        message = link_pb2.CoreMessage(incarnation=self._incarnation, unknown=True)
        send_to(self.socket, peer, message.SerializeToString())

    def refuse(self, peer: ev.Peer, reason: str) -> None:
        """Tells a front end that we have no version in common. It asks again and again; the log says it once."""
        name = peer.decode(errors="replace").partition("/")[0]
        if self._refused.get(name) != reason:
            self._refused[name] = reason
            log.error("front end refused", frontend=name, reason=reason)
            if len(self._refused) > _MAX_REFUSED:
                self._refused.clear()
        message = link_pb2.CoreMessage(incarnation=self._incarnation, refused=reason)
        send_to(self.socket, peer, message.SerializeToString())

    def outgoing(self, peer: ev.Peer) -> Outgoing:
        """What `peer` is told at the end of this turn; for one that is gone, a place to throw things."""
        frontend = self._frontends.get(peer)
        if frontend is None:
            return Outgoing()
        frontend.pending = True
        return frontend.outgoing

    def everyone(self) -> Iterator[Outgoing]:
        """`outgoing` of every front end."""
        for peer in self._frontends:
            yield self.outgoing(peer)

    def set_report(self, peer: ev.Peer, report: link_pb2.MetricReport) -> None:
        """Replaces a front end's metrics."""
        self._frontends[peer].report = report

    def families(self) -> Iterator[link_pb2.MetricFamily]:
        """The metrics of all front ends."""
        for frontend in self._frontends.values():
            yield from frontend.report.families

    def flush(self, written: int = 0, durable: float = math.inf) -> dict[ev.Peer, str]:
        """Sends what this turn has for everyone; returns the front ends that are lost, and why.

        What this turn has waits until the journal is durable up to `written`; now it is up to `durable`.
        """
        lost = {}
        for peer, frontend in self._frontends.items():
            if frontend.pending:
                frame = frontend.outgoing.encode(self._incarnation)
                frontend.backlog.append((written, frame))
                frontend.backlog_bytes += len(frame)
                frontend.outgoing = Outgoing()
                frontend.pending = False
            while frontend.backlog and frontend.backlog[0][0] <= durable:
                outcome = send_to(self.socket, peer, frontend.backlog[0][1])
                if outcome is SendOutcome.GONE:
                    lost[peer] = "its connection is gone"
                if outcome is not SendOutcome.SENT:
                    break
                frontend.backlog_bytes -= len(frontend.backlog.popleft()[1])
            if frontend.backlog_bytes > MAX_BACKLOG:
                lost[peer] = "it reads nothing"
        return lost

    def expired(self, now: float) -> list[ev.Peer]:
        """Front ends whose lease ran out."""
        return [peer for peer, f in self._frontends.items() if now - f.last_heard > self._lease_s]

    def forget(self, peer: ev.Peer, reason: str, *, orderly: bool = False) -> None:
        """Drops a front end, which is nothing to worry about when it left of its own will."""
        if self._frontends.pop(peer, None) is not None:
            tell = partial(log.info, "front end left") if orderly else partial(log.warning, "front end lost")
            tell(frontend=peer.decode(errors="replace"), reason=reason)

    def drain(self, seconds: float) -> None:
        """Goes on sending what is left, for a bounded time; used before the process ends."""
        end = time.monotonic() + seconds
        while not self.flush() and any(f.backlog for f in self._frontends.values()) and time.monotonic() < end:
            time.sleep(0.01)
