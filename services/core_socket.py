"""The socket to the scheduler core: one DEALER inside the event loop, under a fresh incarnation for every connection.

grpc.aio handles one completion, be it a written message or a new call, per turn of the loop, and gRPC cancels calls
that were not accepted for 30 s. So turns must be short whatever the core does: reading is rationed, and credit, of
which every written message returns some, is gathered for a moment; everything else leaves at the end of the turn, in
one message.

The socket's descriptor is edge-triggered: after every send, and whenever the descriptor fires, it is read until nothing
is left. (`zmq.asyncio` would do this for us, at 25 µs a message instead of 1.)
"""

import asyncio
import time
from collections.abc import Callable

import zmq

from shared.ids import draw_incarnation, routing_id
from shared.sockets import LINK_MAX_MESSAGE, Protect, connect_dealer

_READ_FOR_S = 0.001
"""How long messages are read in one go."""
_REST = 3
"""After a go that left something unread, gRPC has the loop for so many times as long."""
_GATHER_S = 0.001
"""What is not urgent may wait for so long for more of it."""
_CLOSE_LINGER_MS = 200


class CoreSocket:
    """Sends what there is to send, hands on what comes, and knows nothing of either."""

    def __init__(
        self,
        address: str,
        frontend_id: str,
        *,
        take: Callable[[], list[bytes]],
        on_message: Callable[[bytes], None],
        protect: Protect,
    ) -> None:
        """`take` gives the messages to send, oldest first, and is asked for more when the last of them has gone;
        `on_message` is given each that comes; `protect` encrypts each new socket."""
        self._address = address
        self._frontend_id = frontend_id
        self._take = take
        self._on_message = on_message
        self._protect = protect
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._unsent: list[bytes] = []
        """Messages that the socket did not take, oldest first; nothing new is asked for meanwhile."""
        self._flush_scheduled = False
        self._gathering = False
        """A flush comes when `_GATHER_S` are over."""
        self._read_scheduled = False
        """A read is on its way; until then the descriptor is not listened to."""
        self._closed = False
        self._connect()

    def start(self) -> None:
        """Begins to read."""
        self._loop.add_reader(self._option(zmq.FD), self._read_on_edge)

    def reconnect(self) -> None:
        """Starts over as a new incarnation.

        ZeroMQ reconnects by itself, but under the old routing id: a ROUTER that has not noticed the loss (heartbeats
        may be late for want of a CPU) takes the new connection for an impostor's and ignores it for good.
        """
        self._loop.remove_reader(self._option(zmq.FD))
        self._socket.close(linger=0)
        self._connect()
        self.start()

    def forget_unsent(self) -> None:
        """What the socket did not take was meant for another incarnation, and is void."""
        self._unsent.clear()

    def flush_soon(self) -> None:
        """Sends what there is at the end of this turn of the loop."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def flush_in_a_moment(self) -> None:
        """The same a little later, with what comes until then."""
        if not self._gathering:
            self._gathering = True
            self._loop.call_later(_GATHER_S, self._flush_gathered)

    def close(self) -> None:
        """Sends what there is, as far as it is taken at once, and leaves."""
        self._flush()
        self._closed = True
        self._loop.remove_reader(self._option(zmq.FD))
        self._socket.close(linger=_CLOSE_LINGER_MS)
        self._context.term()

    def _connect(self) -> None:
        self.incarnation = draw_incarnation()
        self.connected_at = time.monotonic()
        self._socket = connect_dealer(
            self._context,
            self._address,
            identity=routing_id(self._frontend_id, self.incarnation),
            max_message=LINK_MAX_MESSAGE,
            queue_while_away=False,
            protect=self._protect,
        )

    def _flush_gathered(self) -> None:
        self._gathering = False
        self._flush()

    def _flush(self) -> None:
        if self._closed:
            return
        self._flush_scheduled = False
        if not self._unsent:
            self._unsent = self._take()
        try:
            while self._unsent:
                self._socket.send(self._unsent[0], flags=zmq.DONTWAIT)
                del self._unsent[0]
        except zmq.Again:
            pass  # `_read_now` comes by when the socket takes more, the link's tick when it does not
        self._read_if_due()

    def _read_if_due(self, delay: float = 0.0) -> None:
        # A send may have swallowed the edge that announced an arrived message.
        if not self._read_scheduled and self._option(zmq.EVENTS) & zmq.POLLIN:
            self._read_scheduled = True
            self._loop.call_later(delay, self._read_now)

    def _read_on_edge(self) -> None:
        if not self._read_scheduled:
            self._read_now()

    def _read_now(self) -> None:
        if self._closed:
            return
        self._read_scheduled = False
        begin = now = time.monotonic()
        try:
            while now - begin < _READ_FOR_S:
                self._on_message(self._socket.recv(flags=zmq.DONTWAIT))
                now = time.monotonic()
        except zmq.Again:
            pass
        if self._unsent and self._option(zmq.EVENTS) & zmq.POLLOUT:
            self.flush_soon()
        self._read_if_due(_REST * (now - begin))

    def _option(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value
