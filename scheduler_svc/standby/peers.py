"""Sockets between schedulers: a ROUTER at each --standby-address, and a DEALER for each address in --standby-of."""

import os
import socket as names
import time

import zmq
from google.protobuf.message import DecodeError

from protos.quire.journal.v1.replication_pb2 import PeerMessage, SchedulerMessage
from shared.ids import draw_incarnation, routing_id
from shared.sockets import Heartbeat, Protect, bind_router, connect_dealer, receive_from

MAX_MESSAGE = 4 << 20
"""Maximum frame between schedulers, bytes."""
_HEARTBEAT = Heartbeat(300, 1000)
_SILENCE_S = 1.5
"""Silence of a peer after which the connection is replaced, seconds."""


def bind(context: "zmq.Context[zmq.Socket[bytes]]", address: str, protect: Protect) -> "zmq.Socket[bytes]":
    """Return the ROUTER of a scheduler."""
    return bind_router(context, address, max_message=MAX_MESSAGE, heartbeat=_HEARTBEAT, protect=protect)


def receive_peer(router: "zmq.Socket[bytes]") -> tuple[bytes, PeerMessage] | None:
    """Return the next message to a ROUTER, or None. Malformed frames are skipped."""
    while (frame := receive_from(router)) is not None:
        try:
            return frame[0], PeerMessage.FromString(frame[1])
        except DecodeError:
            continue
    return None


class PeerLink:
    """Connection to the ROUTER of another scheduler, which need not exist.

    A connection without any message for some time is replaced under a new routing id, because a ROUTER that has not
    detected the loss of a connection ignores a second one with the same id.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, protect: Protect) -> None:
        self.address = address
        self._context, self._protect = context, protect
        self._name = f"{names.gethostname()[:32]}-{os.getpid()}"
        self.socket = self._connect()

    @property
    def is_new(self) -> bool:
        """Whether nothing was received on this connection yet."""
        return self._heard == self._connected_at

    def send(self, message: PeerMessage) -> bool:
        """Send a message; return False if the peer is not connected or does not read."""
        try:
            self.socket.send(message.SerializeToString(), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self, now: float) -> SchedulerMessage | None:
        """Return the next message, or None. Malformed frames are skipped."""
        while True:
            try:
                frame = self.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return None
            self._heard = now
            try:
                return SchedulerMessage.FromString(frame)
            except DecodeError:
                continue

    def renew(self, now: float) -> bool:
        """Replace a connection that was silent for too long; return whether it was replaced."""
        if now - self._heard < _SILENCE_S:
            return False
        self.close()
        self.socket = self._connect()
        return True

    def close(self) -> None:
        self.socket.close(linger=0)

    def _connect(self) -> "zmq.Socket[bytes]":
        self._heard = self._connected_at = time.monotonic()
        return connect_dealer(
            self._context,
            self.address,
            identity=routing_id(self._name, draw_incarnation()),
            max_message=MAX_MESSAGE,
            queue_while_away=False,
            heartbeat=_HEARTBEAT,
            protect=self._protect,
        )
