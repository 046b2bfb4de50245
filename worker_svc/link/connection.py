"""Connection to the scheduler, with a new socket and a new incarnation for every Hello.

A routing id is never reused, so a message for an earlier incarnation cannot reach a later one. No send blocks: a full
send queue ends the session. A closed connection ends it too, because the scheduler then treats this worker as dead, and
a restarted scheduler does not know this worker. ZeroMQ reconnects silently, so the link watches the socket's monitor.
"""

import time
from collections.abc import Iterator, Sequence

import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_MAX_MESSAGE
from shared.ids import draw_incarnation, routing_id
from shared.logging import get_logger
from shared.schedulers import Schedulers
from shared.sockets import NO_HEARTBEAT, Protect, connect_dealer
from worker_svc.interface.grammar import GrammarReport
from worker_svc.interface.result import StepResult
from worker_svc.link.encoding import encode_grammar_report, encode_hello, encode_result
from worker_svc.link.identity import Identity
from worker_svc.link.session import WELCOME_TIMEOUT_S, Event, HelloReason, Lost, Malformed, Session
from worker_svc.rows.retained import Retained

_HELLO_INTERVAL_S = 0.2
"""Minimum time between two Hellos, which limits the load on a scheduler that does not respond."""
_GOODBYE_LINGER_MS = 500


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
        self._incarnation = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._session = Session(0.0, identity.limits)
        self._said_hello = -_HELLO_INTERVAL_S
        self.malformed_frames = 0
        """Number of frames dropped because they were malformed."""

    @property
    def incarnation(self) -> int:
        return self._incarnation

    def open(self, reason: HelloReason = HelloReason.STARTED, retained: Sequence[Retained] = ()) -> None:
        """Start a new incarnation: open a new socket and send Hello. Unsent and unreceived messages are dropped.

        Args:
            reason: why the worker sends Hello.
            retained: the sequences whose KV is in the blocks.
        """
        # Close the old socket first. Otherwise the old socket could reconnect during the pause and deliver its Hello to
        # the next scheduler.
        self._close_socket(linger=0)
        if reason is HelloReason.SESSION_LOST:
            self._schedulers.leave()
        time.sleep(max(0.0, self._said_hello + _HELLO_INTERVAL_S - time.monotonic()))
        self._said_hello = time.monotonic()
        self._incarnation = draw_incarnation()
        self._socket = connect_dealer(
            self._context,
            self._schedulers.address,
            identity=routing_id(self._identity.worker_id, self._incarnation),
            max_message=PLAN_MAX_MESSAGE,
            heartbeat=NO_HEARTBEAT,
            protect=self._protect,
        )
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        several = self._schedulers.are_several
        self._session = Session(
            self._said_hello,
            self._identity.limits,
            welcome_timeout_s=self._schedulers.timeout_s if several else WELCOME_TIMEOUT_S,
            accepts=self._schedulers.accepts,
        )
        self._send(plan_pb2.WorkerMessage(hello=encode_hello(self._identity, self._incarnation, reason, retained)))

    def receive(self, timeout_ms: int) -> Iterator[Event]:
        """Yield the events that have arrived, after waiting up to `timeout_ms` for the first frame.

        Stops after an event that ends the session, such as a timeout of the scheduler.
        """
        wait = timeout_ms
        while readable := dict(self._poller.poll(wait)):
            wait = 0
            if self._socket not in readable:
                yield Lost("the connection to the scheduler was closed")
                return
            frames = self._connected().recv_multipart(zmq.DONTWAIT)
            event = (
                self._session.receive(frames[0], time.monotonic())
                if len(frames) == 1
                else Malformed(f"{len(frames)} frames")
            )
            if isinstance(event, Malformed):
                self._count(event)
            elif event is not None:
                yield event
                if isinstance(event, Lost):
                    return
        lost = self._session.overdue(time.monotonic())
        if lost is not None:
            yield lost

    def send_result(self, result: StepResult) -> Lost | None:
        """Send the oldest pending plan's result; return `Lost` if it cannot be sent."""
        self._session.answered()
        message = encode_result(result)
        frame = plan_pb2.WorkerMessage(epoch=self._session.epoch, result=message).SerializeToString()
        if len(frame) > PLAN_MAX_MESSAGE:
            return Lost(_too_large(message, len(frame)), HelloReason.STEP_FAILED)
        return None if self._send_frame(frame) else Lost("the scheduler does not read: the send queue is full")

    def send_grammar_report(self, report: GrammarReport) -> None:
        """Send a grammar report. If the report is lost, the scheduler repeats its request after the next Hello."""
        if self._session.epoch:
            message = encode_grammar_report(report)
            self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, grammar=message))

    def send_compiling(self, expected_ms: int) -> None:
        """Ask the scheduler for `expected_ms` more time for the running step; does nothing before Welcome."""
        if self._session.epoch:
            compiling = plan_pb2.Compiling(expected_ms=expected_ms)
            self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, compiling=compiling))

    def close(self, reason: str) -> None:
        """Send Goodbye and close the socket."""
        if self._socket is not None:
            self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, goodbye=plan_pb2.Goodbye(reason=reason)))
            self._close_socket(linger=_GOODBYE_LINGER_MS)
        self._context.term()

    def _close_socket(self, linger: int) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None

    def _send(self, message: plan_pb2.WorkerMessage) -> bool:
        return self._send_frame(message.SerializeToString())

    def _send_frame(self, frame: bytes) -> bool:
        try:
            self._connected().send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _connected(self) -> "zmq.Socket[bytes]":
        if self._socket is None:
            raise RuntimeError("link: not open; call open() first")
        return self._socket

    def _count(self, event: Malformed) -> None:
        self.malformed_frames += 1
        if self.malformed_frames == 1:
            get_logger().warning(
                "malformed frame dropped; further malformed frames are only counted", reason=event.reason
            )


def _too_large(result: plan_pb2.StepResult, size: int) -> str:
    """Return the message for a result that exceeds a frame. The scheduler bounds steps, so this is a bug."""
    sizes = [(part.ByteSize(), part.row) for part in result.scores]
    sizes += [(part.ByteSize(), part.row) for part in result.embeddings]
    bytes_of_row, row = max(sizes, default=(0, 0))
    return (
        f"result of plan {result.step}: {size} bytes exceed the limit of {PLAN_MAX_MESSAGE} bytes per frame:"
        f" row {row} has {bytes_of_row} bytes of log-probabilities or embeddings"
    )
