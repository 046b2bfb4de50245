"""Front-end hub: all connected front ends, with their leases, metrics and outgoing messages.

The core never waits for a front end. Frames that the socket does not accept are queued in a backlog. A front end is
lost if it sends nothing until its lease expires, or if its backlog exceeds `MAX_BACKLOG` because it does not read.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import zmq

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import events as ev
from scheduler_svc.frontend.link import Outgoing
from shared.frames import LINK_MAX_MESSAGE, FrameTooLargeError
from shared.logging import get_logger
from shared.sockets import Protect, SendOutcome, bind_router, send_to

MAX_BACKLOG = 64 << 20
"""Maximum backlog of a front end in bytes. Tokens alone cannot reach it, because streams have credit."""

MAX_VIEW_BYTES = 4 << 20
"""Maximum live-view bytes that a front end gets between two of its own frames, which arrive about once per second."""
_MAX_VIEW_BACKLOG = 1 << 20
"""Backlog in bytes above which a front end gets no live views."""

_NEGLECT_S = 1.2
"""Time after which a front end that got no message gets the state, s. Normally it gets one in response to its report,
each second. The response is late if thousands of its submissions wait before the report.
"""
_MAX_REFUSED = 64

log = get_logger()


@dataclass(slots=True)
class _Frontend:
    last_heard: float
    last_sent: float
    outgoing: Outgoing = field(default_factory=Outgoing)
    pending: bool = False
    """Whether `outgoing` has content."""
    backlog: deque[tuple[int, bytes]] = field(default_factory=deque)
    """(journal position that must be durable before sending, frame)."""
    backlog_bytes: int = 0
    view_bytes: int = 0
    """Bytes of live views since its last frame."""
    report: link_pb2.MetricReport = field(default_factory=link_pb2.MetricReport)


class FrontendHub:
    """ROUTER socket to which front ends connect, and each front end's state."""

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
        """Last reason logged for each refused front end, by name."""

    def __len__(self) -> int:
        return len(self._frontends)

    def __contains__(self, peer: ev.Peer) -> bool:
        """Return whether a front end is connected."""
        return peer in self._frontends

    def heard(self, peer: ev.Peer, now: float, *, version: int = 0) -> bool:
        """Renew a front end's lease; return whether the front end is known.

        A Hello adds the front end; `version` is then the negotiated protocol version.
        """
        if version and peer not in self._frontends:
            self._frontends[peer] = _Frontend(now, now)
            log.info("front end joined", frontend=peer.decode(errors="replace"), protocol_version=version)
        frontend = self._frontends.get(peer)
        if frontend is None:
            return False
        if version:
            self.outgoing(peer).set_version(version)
        frontend.last_heard = now
        frontend.view_bytes = 0
        return True

    def send_unknown(self, peer: ev.Peer) -> None:
        """Ask an unknown front end to send Hello and to resubmit its requests."""
        message = link_pb2.CoreMessage(incarnation=self._incarnation, unknown=True)
        send_to(self.socket, peer, message.SerializeToString())

    def refuse(self, peer: ev.Peer, reason: str) -> None:
        """Refuse a front end without a common protocol version.

        The refusal is logged once, although the front end retries.
        """
        name = peer.decode(errors="replace").partition("/")[0]
        if self._refused.get(name) != reason:
            self._refused[name] = reason
            log.error("front end refused", frontend=name, reason=reason)
            if len(self._refused) > _MAX_REFUSED:
                self._refused.clear()
        message = link_pb2.CoreMessage(incarnation=self._incarnation, refused=reason)
        send_to(self.socket, peer, message.SerializeToString())

    def outgoing(self, peer: ev.Peer) -> Outgoing:
        """Return the object that collects this turn's messages for `peer`; if `peer` is gone, they are dropped."""
        frontend = self._frontends.get(peer)
        if frontend is None:
            return Outgoing()
        frontend.pending = True
        return frontend.outgoing

    def everyone(self) -> Iterator[Outgoing]:
        """Yield `outgoing` of every front end."""
        for peer in self._frontends:
            yield self.outgoing(peer)

    def neglected(self, now: float) -> Iterator[Outgoing]:
        """Yield `outgoing` of the front ends that would consider this process dead, because they got no message."""
        for peer, frontend in self._frontends.items():
            if now - frontend.last_sent > _NEGLECT_S:
                frontend.last_sent = now
                yield self.outgoing(peer)

    def names(self) -> Iterator[str]:
        """Yield the names of the connected front ends."""
        for peer in self._frontends:
            yield peer.decode(errors="replace").partition("/")[0]

    def offer(self, peer: ev.Peer, view: link_pb2.View) -> bool:
        """Add a part of a live view to the messages for `peer`; return False if the front end reads too slowly."""
        frontend = self._frontends.get(peer)
        size = len(view.response)
        if (
            frontend is None
            or frontend.backlog_bytes > _MAX_VIEW_BACKLOG
            or frontend.view_bytes + size > MAX_VIEW_BYTES
        ):
            return False
        frontend.view_bytes += size
        self.outgoing(peer).add_view(view)
        return True

    def set_report(self, peer: ev.Peer, report: link_pb2.MetricReport) -> None:
        """Replace a front end's metrics."""
        self._frontends[peer].report = report

    def families(self) -> Iterator[link_pb2.MetricFamily]:
        """Yield the metrics of all front ends."""
        for frontend in self._frontends.values():
            yield from frontend.report.families

    def flush(self, written: int = 0, durable: float = math.inf) -> dict[ev.Peer, str]:
        """Send this turn's messages; return the lost front ends and the reasons.

        Args:
            written: journal position that must be durable before the messages of this turn are sent.
            durable: journal position that is durable now.
        """
        lost = {}
        now = time.monotonic()
        for peer, frontend in self._frontends.items():
            if frontend.pending:
                try:
                    frames = frontend.outgoing.encode(self._incarnation)
                except FrameTooLargeError as error:
                    frames, lost[peer] = [], str(error)
                frontend.backlog += [(written, frame) for frame in frames]
                frontend.backlog_bytes += sum(map(len, frames))
                frontend.outgoing = Outgoing()
                frontend.pending = False
            while frontend.backlog and frontend.backlog[0][0] <= durable:
                outcome = send_to(self.socket, peer, frontend.backlog[0][1])
                if outcome is SendOutcome.GONE:
                    lost[peer] = "its connection was closed"
                if outcome is not SendOutcome.SENT:
                    break
                frontend.backlog_bytes -= len(frontend.backlog.popleft()[1])
                frontend.last_sent = now
            if frontend.backlog_bytes > MAX_BACKLOG:
                lost[peer] = f"it does not read: more than {MAX_BACKLOG} bytes wait to be sent"
        return lost

    def expired(self, now: float) -> list[ev.Peer]:
        """Return the front ends whose lease has expired."""
        return [peer for peer, f in self._frontends.items() if now - f.last_heard > self._lease_s]

    def forget(self, peer: ev.Peer, reason: str, *, orderly: bool = False) -> None:
        """Drop a front end. If it has sent Goodbye (`orderly`), the log level is lower."""
        if self._frontends.pop(peer, None) is not None:
            write = partial(log.info, "front end left") if orderly else partial(log.warning, "front end lost")
            write(frontend=peer.decode(errors="replace"), reason=reason)

    def leave(self) -> None:
        """Tell all front ends that this core ends as planned, so that they do not count its end as a failure."""
        message = link_pb2.CoreMessage(incarnation=self._incarnation, leaves=True).SerializeToString()
        for peer in self._frontends:
            send_to(self.socket, peer, message)

    def drain(self, seconds: float) -> None:
        """Send the remaining backlogs for up to `seconds`, before the process exits."""
        end = time.monotonic() + seconds
        while not self.flush() and any(f.backlog for f in self._frontends.values()) and time.monotonic() < end:
            time.sleep(0.01)
