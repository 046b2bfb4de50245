"""ZeroMQ sockets with Quire's options: bounded queues, no linger, one frame per message, ROUTER at the scheduler.

These functions do not block. A ROUTER rejects a message to a disconnected peer (`ROUTER_MANDATORY`), which reveals a
process's death; `send_to` returns this as a value. If a frame exceeds `max_message`, ZeroMQ drops the connection.
"""

import enum
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """ZeroMQ heartbeats.

    The peer's I/O thread responds, so they detect a dead machine or a frozen process, but not a hung main loop.
    """

    interval_ms: int
    timeout_ms: int


LINK_HEARTBEAT = Heartbeat(500, 2000)
"""Heartbeat between front end and core."""
PLAN_HEARTBEAT = Heartbeat(200, 600)
"""Heartbeat from scheduler to worker: detects a frozen worker in less than a second."""
NO_HEARTBEAT = Heartbeat(0, 0)
"""No heartbeat. A worker detects a silent scheduler itself, and must not disconnect if the scheduler only stalls."""


Protect = Callable[["zmq.Socket[bytes]"], None]
"""Sets up encryption before a socket is bound or connected; see `shared.curve`."""


# Use integers, because combining pyzmq's flag enums takes longer than receiving a frame.
_NOW = int(zmq.DONTWAIT)
_SEND_MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
_HAS_MORE = int(zmq.RCVMORE)
_READABLE = int(zmq.POLLIN)


class SendOutcome(enum.Enum):
    """Result of sending a message on a ROUTER."""

    SENT = "sent"
    FULL = "full"
    """The peer is connected but its queue is full; the message was dropped."""
    GONE = "gone"
    """No such peer is connected."""


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]",
    address: str,
    *,
    max_message: int,
    heartbeat: Heartbeat = LINK_HEARTBEAT,
    protect: Protect = lambda _socket: None,
) -> "zmq.Socket[bytes]":
    """Return a ROUTER bound to `address` (`ipc://…` or `tcp://…`); `endpoint` returns the port chosen for `:*`."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # Peers never reuse a routing id, so a second connection with the same id is rejected.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    _set_limits(socket, max_message, heartbeat)
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
    """Return a DEALER with the routing id `identity`, which connects to `address` when it is bound.

    Without `queue_while_away`, sending without a connection raises `zmq.Again`, and queued messages are lost with the
    connection. A new peer therefore never reads messages for its predecessor.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.IMMEDIATE, 0 if queue_while_away else 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    _set_limits(socket, max_message, heartbeat)
    protect(socket)
    socket.connect(address)
    return socket


def endpoint(socket: "zmq.Socket[bytes]") -> str:
    """Return the address to which the socket is bound, with the actual port."""
    value = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(value, bytes)
    return value.rstrip(b"\0").decode()


def send_to(router: "zmq.Socket[bytes]", peer: bytes, payload: bytes) -> SendOutcome:
    """Send one message to `peer` without blocking."""
    try:
        router.send(peer, _SEND_MORE)
        router.send(payload, _NOW)
    except zmq.Again:
        return SendOutcome.FULL
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return SendOutcome.GONE
    return SendOutcome.SENT


def receive_from(router: "zmq.Socket[bytes]") -> tuple[bytes, bytes] | None:
    """Return the next (peer, payload) of a ROUTER, or None. Messages with another number of frames are skipped."""
    while True:
        try:
            peer = router.recv(_NOW)
        except zmq.Again:
            return None
        # At least one frame follows the routing id. All frames of a message arrive together.
        payload = router.recv(_NOW)
        if not router.getsockopt(_HAS_MORE):
            return peer, payload
        while router.getsockopt(_HAS_MORE):
            router.recv(_NOW)


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Return whether a message is available."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)


def wait_readable(sockets: "Sequence[zmq.Socket[bytes]]", timeout_s: float, descriptors: Sequence[int] = ()) -> None:
    """Wait up to `timeout_s` until a socket may have a message or a descriptor is readable; may return early.

    ZeroMQ's own poll has a resolution of a millisecond, which is too coarse for just-in-time plans.
    """
    # Check for pending messages first, because the descriptor signals only changes.
    if not any(is_readable(socket) for socket in sockets):
        select.select([*(socket.fileno() for socket in sockets), *descriptors], [], [], max(0.0, timeout_s))


def _set_limits(socket: "zmq.Socket[bytes]", max_message: int, heartbeat: Heartbeat) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat.interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat.timeout_ms)
