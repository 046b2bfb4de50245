"""The socket to the scheduler: a fresh incarnation and a new socket for every Hello.

A routing id that is never reused means that nothing said to an earlier incarnation can reach a later one. No send
blocks: a scheduler that takes nothing is as good as gone. So is one whose connection breaks: it takes the break for
this worker's death, and if it was restarted it knows nobody. ZeroMQ would reconnect without a word; its monitor tells.
"""

import time
from collections.abc import Iterator

import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.ids import draw_incarnation, routing_id
from shared.logging import get_logger
from shared.sockets import NO_HEARTBEAT, PLAN_MAX_MESSAGE, Protect, connect_dealer
from worker_svc.session import Event, Lost, Malformed, Session

_HELLO_INTERVAL_S = 0.2
"""Least time between two Hellos, so that a scheduler that takes none is not stormed."""
_GOODBYE_LINGER_MS = 500


class Link:
    """The connection of one worker."""

    def __init__(self, address: str, hello: plan_pb2.Hello, protect: Protect = lambda _socket: None) -> None:
        """Connects when `open` is called.

        Args:
            address: the scheduler's ZeroMQ address.
            hello: what to say of this worker; the incarnation is filled in.
            protect: encrypts each new socket.
        """
        self._protect = protect
        self._address = address
        self._hello = hello
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._session = Session(0.0)
        self._said_hello = -_HELLO_INTERVAL_S
        self.malformed_frames = 0
        """Frames dropped because they were no message of the protocol."""

    @property
    def incarnation(self) -> int:
        """The present one."""
        return self._hello.incarnation

    def open(self) -> None:
        """Begins a new incarnation: new socket, Hello. What the old one had in flight is lost."""
        time.sleep(max(0.0, self._said_hello + _HELLO_INTERVAL_S - time.monotonic()))
        self._said_hello = time.monotonic()
        self._close_socket(linger=0)
        self._hello.incarnation = draw_incarnation()
        self._socket = connect_dealer(
            self._context,
            self._address,
            identity=routing_id(self._hello.worker_id, self._hello.incarnation),
            max_message=PLAN_MAX_MESSAGE,
            heartbeat=NO_HEARTBEAT,
            protect=self._protect,
        )
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        self._session = Session(self._said_hello)
        self._send(plan_pb2.WorkerMessage(hello=self._hello))

    def receive(self, timeout_ms: int) -> Iterator[Event]:
        """What has arrived, after waiting up to `timeout_ms` for the first frame.

        Ends after an event that ends the session, which may be silence.
        """
        wait = timeout_ms
        while readable := dict(self._poller.poll(wait)):
            wait = 0
            if self._socket not in readable:
                yield Lost("the connection is gone")
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

    def send_result(self, result: plan_pb2.StepResult) -> Lost | None:
        """Answers the oldest unanswered plan; the end of the session if the scheduler takes nothing."""
        self._session.answered()
        sent = self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, result=result))
        return None if sent else Lost("the scheduler takes nothing")

    def send_grammar_report(self, report: plan_pb2.GrammarReport) -> None:
        """Says what became of a grammar; one that is not heard is asked for again after the next Hello."""
        if self._session.epoch:
            self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, grammar=report))

    def tell_compiling(self, expected_ms: int) -> None:
        """Asks for so much more time for the step in hand; without an epoch there is none."""
        if self._session.epoch:
            compiling = plan_pb2.Compiling(expected_ms=expected_ms)
            self._send(plan_pb2.WorkerMessage(epoch=self._session.epoch, compiling=compiling))

    def close(self, reason: str) -> None:
        """Says Goodbye and closes."""
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
        try:
            self._connected().send(message.SerializeToString(), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _connected(self) -> "zmq.Socket[bytes]":
        if self._socket is None:
            raise RuntimeError("the link is not open")
        return self._socket

    def _count(self, event: Malformed) -> None:
        self.malformed_frames += 1
        if self.malformed_frames == 1:
            get_logger().warning("malformed frame dropped; further ones are only counted", reason=event.reason)
