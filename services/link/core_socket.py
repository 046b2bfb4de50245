"""Socket to one address of a scheduler core: a DEALER on the event loop, with a new incarnation for every connection.

grpc.aio handles completions (for example a written message or a new call) once per iteration of the event loop, and
cancels calls that are not accepted within 30 s. Iterations must therefore be short, so the time for reading from the
socket is limited.

Each message written to a client returns credit to the scheduler. These returns are batched for a short time. All other
data is sent in one message at the end of the iteration.

A monitor socket reports a lost connection, so that the death of a scheduler is detected immediately.

The socket's file descriptor is edge-triggered. After every send, and whenever the descriptor fires, the socket is read
until it is empty. (`zmq.asyncio` would do the same, but takes 25 µs per message instead of 1 µs.)
"""

import asyncio
import time
from collections.abc import Callable

import zmq

from shared.frames import LINK_MAX_MESSAGE
from shared.ids import draw_incarnation, routing_id
from shared.sockets import Heartbeat, Protect, connect_dealer

_MAX_READ_S = 0.001
"""Maximum duration of one read pass, seconds."""
_READ_PAUSE_FACTOR = 3
"""Pause after an incomplete read pass, as a multiple of its duration, in which gRPC can use the event loop."""
_BATCH_DELAY_S = 0.001
"""Delay of messages that are not urgent, seconds, so that several are sent together."""
_CLOSE_LINGER_MS = 200


class CoreSocket:
    """Transport to the core. It sends and receives messages and does not interpret them."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        frontend_id: str,
        *,
        take: Callable[[], list[bytes]],
        on_message: Callable[["CoreSocket", bytes], None],
        on_disconnected: Callable[["CoreSocket"], None],
        heartbeat: Heartbeat,
        protect: Protect,
    ) -> None:
        """Create and connect the socket.

        Args:
            context: context of the socket.
            address: ZeroMQ address of a scheduler.
            frontend_id: name of this front end, part of the routing id.
            take: returns the messages to send, oldest first; called again when the last of them has been sent.
            on_message: called with each received message.
            on_disconnected: called when an open connection is lost.
            heartbeat: heartbeat of the connection.
            protect: sets up encryption of each new socket.
        """
        self.address = address
        self._frontend_id = frontend_id
        self._take = take
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._heartbeat = heartbeat
        self._protect = protect
        self._loop = asyncio.get_running_loop()
        self._context = context
        self.last_heard = float("-inf")
        """Time of the newest message on any connection to this address."""
        self.hello_core = 0
        """Incarnation of the core to whose `unknown` message the newest Hello responds."""
        self.is_chosen = False
        """Whether messages to the core use this socket. Otherwise, only `say_hello` sends."""
        self._unsent: list[bytes] = []
        """Messages that the socket did not accept, oldest first. New messages are requested only after these are sent.
        """
        self._flush_scheduled = False
        self._delayed_flush_scheduled = False
        """Whether a flush is scheduled after `_BATCH_DELAY_S`."""
        self._read_scheduled = False
        """Whether a read is scheduled; events of the descriptor are ignored until then."""
        self._closed = False
        self._connect()
        self._start()

    @property
    def closed(self) -> bool:
        """Whether `disconnect` or `close` was called."""
        return self._closed

    def reconnect(self) -> None:
        """Reconnect under a new incarnation.

        ZeroMQ reconnects automatically, but with the old routing id. A ROUTER that has not detected the loss treats the
        new connection as a duplicate and ignores it permanently. This happens because heartbeats may be late on a busy
        machine.
        """
        self.disconnect()
        self._closed = False
        self._connect()
        self._start()

    def disconnect(self) -> None:
        """Close the connection. Messages that the socket did not accept are dropped."""
        self.is_chosen = False
        self._unsent.clear()
        if not self._closed:
            self._closed = True
            self._stop_reading()
            self._socket.close(linger=0)

    def say_hello(self, hello: bytes) -> None:
        """Send a Hello instead of all messages that the socket did not accept."""
        self._unsent = [hello]
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send pending messages at the end of this turn of the loop."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def flush_delayed(self) -> None:
        """Send pending messages after `_BATCH_DELAY_S`, together with those that arrive until then."""
        if not self._delayed_flush_scheduled:
            self._delayed_flush_scheduled = True
            self._loop.call_later(_BATCH_DELAY_S, self._flush_after_delay)

    def close(self) -> None:
        """Send pending messages without waiting and close the socket."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._stop_reading()
            self._socket.close(linger=_CLOSE_LINGER_MS)

    def _connect(self) -> None:
        self.incarnation, self.hello_core = draw_incarnation(), 0
        self.connected_at = time.monotonic()
        self._socket = connect_dealer(
            self._context,
            self.address,
            identity=routing_id(self._frontend_id, self.incarnation),
            max_message=LINK_MAX_MESSAGE,
            queue_while_away=False,
            heartbeat=self._heartbeat,
            protect=self._protect,
        )
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _start(self) -> None:
        self._loop.add_reader(_descriptor(self._socket), self._read_on_edge)
        self._loop.add_reader(_descriptor(self._monitor), self._read_monitor)
        # The descriptor reports only changes after the last read.
        self._read_monitor()

    def _stop_reading(self) -> None:
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)

    def _read_monitor(self) -> None:
        try:
            self._monitor.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
        # One event suffices, because the reconnect creates a new socket with its own monitor.
        self._on_disconnected(self)

    def _flush_after_delay(self) -> None:
        self._delayed_flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._closed:
            return
        if not self._unsent and self.is_chosen:
            self._unsent = self._take()
        try:
            while self._unsent:
                self._socket.send(self._unsent[0], flags=zmq.DONTWAIT)
                del self._unsent[0]
        except zmq.Again:
            pass  # `_read_now` retries when the socket is writable again, or the link's tick does.
        self._read_if_due()

    def _read_if_due(self, delay: float = 0.0) -> None:
        # A send may have consumed the edge that announced an incoming message.
        if not self._read_scheduled and self._option(zmq.EVENTS) & zmq.POLLIN:
            self._read_scheduled = True
            self._loop.call_later(delay, self._read_now)

    def _read_on_edge(self) -> None:
        if not self._read_scheduled:
            self._read_now()

    def _read_now(self) -> None:
        self._read_scheduled = False
        begin = now = time.monotonic()
        try:
            while not self._closed and now - begin < _MAX_READ_S:
                self._on_message(self, self._socket.recv(flags=zmq.DONTWAIT))
                now = time.monotonic()
        except zmq.Again:
            pass
        if self._closed:
            return
        if self._unsent and self._option(zmq.EVENTS) & zmq.POLLOUT:
            self.flush_soon()
        self._read_if_due(_READ_PAUSE_FACTOR * (now - begin))

    def _option(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    """Return the file descriptor of a socket, for the event loop."""
    value = socket.getsockopt(zmq.FD)
    assert isinstance(value, int)
    return value
