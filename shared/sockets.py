"""ZeroMQ sockets as Quire uses them: bounded, never lingering, one frame per message, ROUTER at the scheduler.

Nothing here blocks and nothing here decides. A ROUTER refuses to send to a peer that is gone (`ROUTER_MANDATORY`),
which is how the death of a process is noticed; `send_to` turns that into a value. A frame larger than `max_message`
makes ZeroMQ drop the connection.
"""

import enum
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

PLAN_MAX_MESSAGE = 64 << 20
"""Largest frame between scheduler and worker, bytes."""
LINK_MAX_MESSAGE = 16 << 20
"""Largest frame between front end and core, bytes."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """ZeroMQ's own pings, answered by the peer's I/O thread: they see a dead machine and a frozen process without any
    traffic of ours, and do not see a hung one."""

    interval_ms: int
    timeout_ms: int


LINK_HEARTBEAT = Heartbeat(500, 2000)
"""Between front end and core."""
PLAN_HEARTBEAT = Heartbeat(200, 600)
"""From scheduler to worker: a frozen worker is noticed in less than a second."""
NO_HEARTBEAT = Heartbeat(0, 0)
"""For a worker: it knows by the scheduler's silence, and must not break a connection because the scheduler stalled."""


Protect = Callable[["zmq.Socket[bytes]"], None]
"""Sets up encryption before a socket is bound or connected; see `shared.curve`."""


class SendOutcome(enum.Enum):
    """What became of a message handed to a ROUTER."""

    SENT = "sent"
    FULL = "full"
    """The peer is connected but takes nothing; the message was dropped."""
    GONE = "gone"
    """There is no such peer (any more)."""


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    *,
    max_message: int,
    heartbeat: Heartbeat = LINK_HEARTBEAT,
    protect: Protect = lambda _socket: None,
) -> "zmq.Socket[bytes]":
    """A ROUTER bound to `address` (`ipc://…` or `tcp://…`); see `endpoint` for the port that `:*` became."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A routing id is never reused by an honest peer: a second owner of one is refused.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    _bound(socket, max_message, heartbeat)
    protect(socket)
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    socket.bind(address)
    return socket


def connect_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    *,
    identity: bytes,
    max_message: int,
    queue_while_away: bool = True,
    heartbeat: Heartbeat = LINK_HEARTBEAT,
    protect: Protect = lambda _socket: None,
) -> "zmq.Socket[bytes]":
    """A DEALER with the routing id `identity`, connected to `address` (now, or as soon as somebody binds it).

    Without `queue_while_away` nothing can be sent while there is no connection (`zmq.Again`), and what was queued for a
    connection goes with it: a peer that comes back never reads what was meant for its predecessor.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 0 if queue_while_away else 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    _bound(socket, max_message, heartbeat)
    protect(socket)
    socket.connect(address)
    return socket


def endpoint(socket: "zmq.Socket[bytes]") -> str:
    """The address the socket is bound to, with the port the system chose."""
    value = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(value, bytes)
    return value.rstrip(b"\0").decode()


def send_to(router: "zmq.Socket[bytes]", peer: bytes, payload: bytes) -> SendOutcome:
    """Sends one message to `peer` without ever blocking."""
    try:
        router.send_multipart((peer, payload), flags=zmq.DONTWAIT, copy=True)
    except zmq.Again:
        return SendOutcome.FULL
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return SendOutcome.GONE
    return SendOutcome.SENT


def receive_from(router: "zmq.Socket[bytes]") -> tuple[bytes, bytes] | None:
    """The next (peer, payload) of a ROUTER, or None when nothing is there. Frames of another shape are skipped."""
    while True:
        try:
            frames = router.recv_multipart(flags=zmq.DONTWAIT)
        except zmq.Again:
            return None
        if len(frames) == 2:
            return frames[0], frames[1]


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message is there."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def wait_readable(sockets: "Sequence[zmq.Socket[bytes]]", timeout_s: float, descriptors: Sequence[int] = ()) -> None:
    """Waits until one of the sockets may have a message or a descriptor is readable, but no longer than `timeout_s`; it
    may return early.

    ZeroMQ's own poll counts in whole milliseconds, which is too coarse for plans that go out just in time.
    """
    # A socket's descriptor tells changes only: what was there before must be asked for.
    if not any(is_readable(socket) for socket in sockets):
        select.select([*(socket.fileno() for socket in sockets), *descriptors], [], [], max(0.0, timeout_s))


def _bound(socket: "zmq.Socket[bytes]", max_message: int, heartbeat: Heartbeat) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat.interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat.timeout_ms)
