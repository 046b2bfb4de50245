"""Connection to the scheduler, with a new socket and a new incarnation for every Hello.

A routing id is never reused, so a message for an earlier incarnation cannot reach a later one. No send blocks: a full
send queue ends the session. A closed connection ends it too, because the scheduler then treats this worker as dead, and
a restarted scheduler does not know this worker. ZeroMQ reconnects silently, so the link watches the socket's monitor.

If there are several schedulers, the link says Hello to all of them at the same time. The first Welcome begins the
session, and the link closes the other connections. Hellos that are sent at the same time have one incarnation. If two
addresses lead to one scheduler, its ROUTER ignores the second connection, so the worker does not replace itself.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_MAX_MESSAGE
from shared.ids import draw_incarnation, routing_id
from shared.logging import get_logger
from shared.schedulers import Schedulers
from shared.sockets import NO_HEARTBEAT, Protect, connect_dealer
from worker_svc.interface.disk import DiskReport
from worker_svc.interface.grammar import GrammarReport
from worker_svc.interface.result import StepResult
from worker_svc.link.encoding import encode_disk_report, encode_grammar_report, encode_hello, encode_result
from worker_svc.link.identity import Identity
from worker_svc.link.session import Event, HelloReason, Lost, Malformed, Session, Welcomed
from worker_svc.rows.retained import Retained

_HELLO_INTERVAL_S = 0.2
"""Minimum time between two Hellos to an address, which limits the load on a scheduler that does not respond."""
_GOODBYE_LINGER_MS = 500


@dataclass(slots=True)
class _Connection:
    """Connection to one address."""

    address: str
    socket: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    incarnation: int
    session: Session

    def close(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.socket.close(linger=linger)
        self.monitor.close(linger=0)


class Link:
    """The connection of one worker."""

    def __init__(self, address: str, identity: Identity, protect: Protect = lambda _socket: None) -> None:
        """Create a link that connects when `open` is called.

        Args:
            address: the scheduler's ZeroMQ address, or the addresses of several, separated by commas.
            identity: the description of this worker, for Hello.
            protect: sets up encryption on each new socket.
        """
        self._protect = protect
        self._schedulers = Schedulers(address)
        self._identity = identity
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: list[_Connection] = []
        """The connection of the session, or the connections on which Hello was sent."""
        self._connection: _Connection | None = None
        """The connection of the session; None before Welcome."""
        self._hello = plan_pb2.WorkerMessage()
        self._said_hello = dict.fromkeys(self._schedulers.addresses, -_HELLO_INTERVAL_S)
        """Time of the last Hello to each address."""
        self._poller = zmq.Poller()
        self.incarnation = 0
        """Incarnation of the session, or of the newest Hello."""
        self.malformed_frames = 0
        """Number of frames dropped because they were malformed."""

    def open(self, reason: HelloReason = HelloReason.STARTED, retained: Sequence[Retained] = ()) -> None:
        """Start a new incarnation: open new sockets and send Hello. Unsent and unreceived messages are dropped.

        Args:
            reason: why the worker sends Hello.
            retained: the sequences whose KV is in the blocks.
        """
        # Close the old socket first. Otherwise the old socket could reconnect during the pause and deliver its Hello to
        # the next scheduler.
        self._close(linger=0)
        time.sleep(max(0.0, max(self._said_hello.values()) + _HELLO_INTERVAL_S - time.monotonic()))
        self._hello = plan_pb2.WorkerMessage(hello=encode_hello(self._identity, 0, reason, retained))
        incarnation = draw_incarnation()
        for address in self._schedulers.addresses:
            self._connect(address, incarnation)

    def receive(self, timeout_ms: int) -> Iterator[Event]:
        """Yield the events that have arrived, after waiting up to `timeout_ms` for the first frame.

        Stops after an event that ends the session, such as a timeout of the scheduler. Before Welcome, an address whose
        connection is lost gets another Hello instead.
        """
        wait = self._greet(timeout_ms)
        while readable := dict(self._poller.poll(wait)):
            wait = 0
            connection = next(each for each in self._connections if each.socket in readable or each.monitor in readable)
            event = self._read(connection, closed=connection.socket not in readable)
            if isinstance(event, Lost):
                if not self._lose(connection, event):
                    yield event
                    return
            elif isinstance(event, Malformed):
                self._count(event)
            elif event is not None:
                if isinstance(event, Welcomed):
                    self._stay_with(connection)
                yield event
        for connection in tuple(self._connections):
            lost = connection.session.overdue(time.monotonic())
            if lost is not None and not self._lose(connection, lost):
                yield lost

    def _greet(self, timeout_ms: int) -> int:
        """Send due Hellos; return the maximum wait, in ms, until the next one is due."""
        if self._connection is not None:
            return timeout_ms
        incarnation = draw_incarnation()
        for address in set(self._schedulers.addresses).difference(each.address for each in self._connections):
            wait_s = self._said_hello[address] + _HELLO_INTERVAL_S - time.monotonic()
            if wait_s > 0:
                timeout_ms = min(timeout_ms, 1 + int(1000 * wait_s))
            else:
                self._connect(address, incarnation)
        return timeout_ms

    def _read(self, connection: _Connection, *, closed: bool) -> Event | None:
        if closed:
            return Lost("the connection to the scheduler was closed")
        frames = connection.socket.recv_multipart(zmq.DONTWAIT)
        if len(frames) != 1:
            return Malformed(f"{len(frames)} frames")
        return connection.session.receive(frames[0], time.monotonic())

    def _lose(self, connection: _Connection, lost: Lost) -> bool:
        """Close a connection before Welcome, so that its address gets another Hello; return False after Welcome."""
        if connection is self._connection:
            return False
        get_logger().warning("not welcomed; sending Hello again", address=connection.address, reason=lost.reason)
        self._drop(connection)
        return True

    def _stay_with(self, connection: _Connection) -> None:
        self._connection, self.incarnation = connection, connection.incarnation
        for each in tuple(self._connections):
            if each is not connection:
                self._drop(each)

    def send_result(self, result: StepResult) -> Lost | None:
        """Send the oldest pending plan's result; return `Lost` if it cannot be sent."""
        connection = self._welcomed()
        connection.session.answered()
        message = encode_result(result)
        frame = plan_pb2.WorkerMessage(epoch=connection.session.epoch, result=message).SerializeToString()
        if len(frame) > PLAN_MAX_MESSAGE:
            return Lost(_too_large(message, len(frame)), HelloReason.STEP_FAILED)
        return None if _send(connection, frame) else Lost("the scheduler does not read: the send queue is full")

    def send_grammar_report(self, report: GrammarReport) -> None:
        """Send a grammar report. If the report is lost, the scheduler repeats its request after the next Hello."""
        if self._connection is not None:
            message = encode_grammar_report(report)
            self._send(plan_pb2.WorkerMessage(grammar=message))

    def send_disk_report(self, report: DiskReport) -> bool:
        """Send a report of the disk; return whether it was sent. It can be sent again later."""
        if self._connection is None:
            return False
        epoch = self._connection.session.epoch
        message = plan_pb2.WorkerMessage(epoch=epoch, disk=encode_disk_report(report))
        return _send(self._connection, message.SerializeToString())

    def send_compiling(self, expected_ms: int) -> None:
        """Ask the scheduler for `expected_ms` more time for the running step; does nothing before Welcome."""
        if self._connection is not None:
            self._send(plan_pb2.WorkerMessage(compiling=plan_pb2.Compiling(expected_ms=expected_ms)))

    def close(self, reason: str) -> None:
        """Send Goodbye and close the socket."""
        for each in self._connections:
            message = plan_pb2.WorkerMessage(epoch=each.session.epoch, goodbye=plan_pb2.Goodbye(reason=reason))
            _send(each, message.SerializeToString())
        self._close(linger=_GOODBYE_LINGER_MS)
        self._context.term()

    def _connect(self, address: str, incarnation: int) -> None:
        """Connect to an address and send Hello."""
        now = self._said_hello[address] = time.monotonic()
        self.incarnation = self._hello.hello.incarnation = incarnation
        socket = connect_dealer(
            self._context,
            address,
            identity=routing_id(self._identity.worker_id, self.incarnation),
            max_message=PLAN_MAX_MESSAGE,
            heartbeat=NO_HEARTBEAT,
            protect=self._protect,
        )
        session = Session(now, self._identity.limits, accepts=self._schedulers.accepts)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connection = _Connection(address, socket, monitor, self.incarnation, session)
        self._connections.append(connection)
        for each in (socket, monitor):
            self._poller.register(each, zmq.POLLIN)
        _send(connection, self._hello.SerializeToString())

    def _drop(self, connection: _Connection, linger: int = 0) -> None:
        for each in (connection.socket, connection.monitor):
            self._poller.unregister(each)
        connection.close(linger)
        self._connections.remove(connection)

    def _close(self, linger: int) -> None:
        self._connection = None
        while self._connections:
            self._drop(self._connections[-1], linger)

    def _send(self, message: plan_pb2.WorkerMessage) -> None:
        connection = self._welcomed()
        message.epoch = connection.session.epoch
        _send(connection, message.SerializeToString())

    def _welcomed(self) -> _Connection:
        if self._connection is None:
            raise RuntimeError("link: no session; wait for Welcomed first")
        return self._connection

    def _count(self, event: Malformed) -> None:
        self.malformed_frames += 1
        if self.malformed_frames == 1:
            get_logger().warning(
                "malformed frame dropped; further malformed frames are only counted", reason=event.reason
            )


def _send(connection: _Connection, frame: bytes) -> bool:
    """Send a frame; return False if the send queue is full."""
    try:
        connection.socket.send(frame, zmq.DONTWAIT)
    except zmq.Again:
        return False
    return True


def _too_large(result: plan_pb2.StepResult, size: int) -> str:
    """Return the message for a result that exceeds a frame. The scheduler bounds steps, so this is a bug."""
    sizes = [(part.ByteSize(), part.row) for part in result.scores]
    sizes += [(part.ByteSize(), part.row) for part in result.embeddings]
    bytes_of_row, row = max(sizes, default=(0, 0))
    return (
        f"result of plan {result.step}: {size} bytes exceed the limit of {PLAN_MAX_MESSAGE} bytes per frame:"
        f" row {row} has {bytes_of_row} bytes of log-probabilities or embeddings"
    )
