"""Link to the scheduler core: the protocol state over a `CoreSocket`.

Handshake: the front end sends a Hello at start, and whenever the core reports that it does not know this front end.
Until the core responds with its state, the front end sends nothing else. It then submits every live stream with the
tokens received so far. A core that starts late, restarts, or has dropped this front end therefore needs no special
handling.

A previously submitted stream is marked as accepted, so that the next core does not reject it. The index identifies
tokens that the new core repeats. After a gap, the stream is submitted under a new number, so that late messages for the
old number are ignored.

If a connection is lost, the link reconnects immediately under a new incarnation. The core responds to every report,
about once per second. After `SILENCE_TIMEOUT_S` without a response, the service is not ready, and the link reconnects
too. Streams remain open. After `GIVE_UP_S`, they end with an error.

If there are several schedulers, the link says Hello to all of them at the same time. The first core that reports its
state is chosen, and the link closes the other connections.
"""

import asyncio
import functools
import itertools
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import zmq
from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from services.errors import RETRY_MS, InternalError, operator_error
from services.link.core_socket import CoreSocket
from services.link.incoming import tokens_by_stream
from services.link.live_view import LiveView
from services.link.outgoing import Outgoing
from services.streams.logprobs import read_scores
from services.streams.stream import Received, Stream
from shared.columns import MalformedColumnError
from shared.errors import NotReadyError, NoWorkerError
from shared.frames import LINK_VERSIONS, MAX_SEQUENCE, MAX_VOCABULARY, MalformedFrameError
from shared.ids import draw_error_id
from shared.logging import LEVELS, get_logger, set_level
from shared.schedulers import Schedulers
from shared.sockets import LINK_HEARTBEAT, Heartbeat, Protect

REPORT_EVERY_S = 1.0
"""Interval of metric reports to the core, seconds."""
SILENCE_TIMEOUT_S = 3.0
"""Silence of the core after which the link reconnects, seconds."""
RECONNECT_EVERY_S = 0.5
"""Minimum time between two connection attempts, seconds."""
STALL_S = 1.0
"""Delay of a tick above which this process counts as stalled, in seconds."""
GIVE_UP_S = 60.0
"""Time without a core after which streams end with an error, seconds."""
OPERATOR_TIMEOUT_S = 5.0
"""Timeout for the reply to an operator request, s."""

_MAX_STREAM_NUMBER = 0x7FFFFFFF
_SHORT_HEARTBEAT = Heartbeat(500, 1000)
"""Heartbeat if there are several schedulers, so that a lost machine is detected before another scheduler leads."""

Families = list[link_pb2.MetricFamily]
AnswerT = TypeVar("AnswerT")


class CoreLink:
    """Connection to the core: the streams by number, and the last known state of the core."""

    def __init__(
        self,
        address: str,
        frontend_id: str,
        *,
        families: Callable[[], Families],
        on_state: Callable[[], None],
        protect: Protect = lambda _socket: None,
    ) -> None:
        """Create the link; `start` connects it.

        Args:
            address: ZeroMQ address of the core, or the addresses of several schedulers, separated by commas.
            frontend_id: name of this front end.
            families: returns the front end's own metrics.
            on_state: called when `ready` may have changed.
            protect: sets up encryption of each new socket.
        """
        self._frontend_id = frontend_id
        self._loop = asyncio.get_running_loop()
        self._families = families
        self._on_state = on_state
        self._outgoing = Outgoing()
        self._schedulers = Schedulers(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._new_socket = functools.partial(
            CoreSocket,
            self._context,
            frontend_id=frontend_id,
            take=self._outgoing.take,
            on_message=self._take_message,
            on_disconnected=self._disconnected,
            heartbeat=_SHORT_HEARTBEAT if self._schedulers.are_several else LINK_HEARTBEAT,
            protect=protect,
        )
        self._sockets: tuple[CoreSocket, ...] = ()
        """A socket for each scheduler."""
        self._chosen: CoreSocket | None = None
        """The socket of the core that has accepted this front end; None before its first state message."""
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.cycle(range(1, _MAX_STREAM_NUMBER))
        self._snapshots: dict[int, asyncio.Future[Families]] = {}
        self._replies: dict[int, asyncio.Future[link_pb2.OperatorReply]] = {}
        self._resumes: dict[int, asyncio.Future[link_pb2.ResumeReply]] = {}
        self._views: dict[int, LiveView] = {}
        self._question_numbers = itertools.count(1)
        self._core = 0
        """Incarnation of the core that has accepted this front end."""
        self._in_handshake = False
        """Whether the handshake is in progress. Only hello is sent until it ends."""
        self._last_heard = float("-inf")
        self._created_at = self._away_since = self._ticked_at = time.monotonic()
        self._stalls: deque[tuple[float, float]] = deque(maxlen=16)
        """(start, end) of this process's most recent stalls."""
        self._state = link_pb2.ServiceState()
        self._model: link_pb2.ServedModel | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._refused = ""
        """Why the core rejects this front end; empty if it does not."""
        self.protocol_version = LINK_VERSIONS.oldest
        """Negotiated protocol version; features of newer versions are not used."""
        self.malformed_messages = 0
        self.num_restarts = self.num_orderly_restarts = 0
        self._core_leaves = False
        """Whether the core has said that it ends as planned."""
        """Number of cores that accepted this front end, not counting the first."""

    @property
    def connected(self) -> bool:
        """Whether a message from the core arrived within `SILENCE_TIMEOUT_S`.

        Streams submitted during a handshake are sent after it.
        """
        return not self._refused and time.monotonic() - self._last_heard < SILENCE_TIMEOUT_S

    @property
    def silence_s(self) -> float:
        """Time since the newest message of the core, or since this link was created if there was none."""
        return time.monotonic() - max(self._last_heard, self._created_at)

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""
        return self.connected and self._state.ready

    @property
    def max_call_requests(self) -> int:
        """Maximum number of requests that one call can submit at a time."""
        return self._state.max_call_requests or sys.maxsize

    @property
    def max_call_tokens(self) -> int:
        """Maximum total number of prompt tokens in all requests of one call."""
        return self._state.max_call_tokens or sys.maxsize

    @property
    def model(self) -> link_pb2.ServedModel | None:
        """The last known served model; None until a first worker has joined.

        A restarted core has no model until workers reconnect. Requests for the previous model are still accepted. The
        core decides how long they wait for a worker.
        """
        return self._model

    def start(self) -> None:
        """Connect; the core need not be running yet."""
        self._sockets = tuple(self._new_socket(address=address) for address in self._schedulers.addresses)
        self._begin_handshake()
        self._ticking = self._loop.create_task(self._tick_forever())

    async def close(self) -> None:
        """Send pending messages and goodbye without waiting, then close the socket."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if not self._in_handshake:
            self._outgoing.goodbye()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def submit(self, stream: Stream) -> None:
        """Submit a stream under a new number. If no core is connected, submit it after the next handshake."""
        stream.number = next(number for number in self._numbers if number not in self._streams)
        if not self._in_handshake:
            self._outgoing.submit(stream.submission(time.monotonic()))
            self._flush_soon()
        self._streams[stream.number] = stream

    def release(self, stream: Stream, *, keep: bool = False) -> None:
        """Remove a stream. Cancel it at the core unless it has ended.

        Args:
            stream: a stream whose client has left or is done.
            keep: detach instead of cancelling, because the client may resume.
        """
        if self._streams.pop(stream.number, None) is not None and stream.end is None and not self._in_handshake:
            if keep:
                self._outgoing.detach(stream.number)
            else:
                self._outgoing.cancel(stream.number)
            self._flush_soon()

    def give_credit(self, stream: Stream) -> None:
        """Return the credit for output that the client has read."""
        due = stream.credit_due()
        if due and not self._in_handshake:
            self._outgoing.credit(stream.number, due)
            self._flush_delayed()

    def report_call(self, report: link_pb2.RequestReport) -> None:
        """Report a finished call to the core, with the next messages; under load, some reports are dropped."""
        if report.stream and not self._in_handshake:
            self._outgoing.report_call(report)
            self._flush_delayed()

    def stalled_s(self, since: float, now: float) -> float:
        """Return how long this process has stalled since a given time."""
        stalls = [*self._stalls, *self._stall_until(now)]
        return sum(max(0.0, end - max(begin, since)) for begin, end in stalls)

    def _stall_until(self, now: float) -> list[tuple[float, float]]:
        """Return the stall that delays the next tick, if there is one."""
        due = self._ticked_at + REPORT_EVERY_S
        return [(due, now)] if now - due > STALL_S else []

    def trace(self, number: int, traceparent: str) -> None:
        """Ask the core for the spans of an ended stream, below the span with this traceparent."""
        if not self._in_handshake:
            self._outgoing.trace(number, traceparent)
            self._flush_delayed()

    async def snapshot(self, timeout_s: float) -> Families | None:
        """Return the metrics of the whole service, or None on timeout."""
        if self._in_handshake:
            return None
        number = next(self._question_numbers)
        self._outgoing.report(self._report(), snapshot_request=number)
        return await self._answer(self._snapshots, number, timeout_s)

    async def operate(
        self, request: link_pb2.OperatorRequest, timeout_s: float = OPERATOR_TIMEOUT_S
    ) -> link_pb2.OperatorReply:
        """Send an operator request and return the reply.

        Raises:
            NotReadyError: the core did not respond in time.
            QuireError: the core reported an error.
        """
        reply = None
        if not self._in_handshake:
            request.number = request.number or next(self._question_numbers)
            self._outgoing.operate(request)
            try:
                reply = await self._answer(self._replies, request.number, timeout_s)
            finally:
                if reply is None:
                    self._end_order(request.number)  # The caller has left, so the core may stop the work.
        if reply is None:
            raise NotReadyError("scheduler did not respond in time; try again in a moment", retry_ms=RETRY_MS)
        if reply.HasField("error"):
            raise operator_error(reply.error)
        return reply

    @asynccontextmanager
    async def watch(self, request: link_pb2.OperatorRequest) -> AsyncIterator[LiveView]:
        """Open a live view with an operator request. The end of the `with` block closes the view.

        Raises:
            NotReadyError: the core did not respond in time.
            QuireError: the core reported an error.
        """
        number = request.number = next(self._question_numbers)
        view = self._views[number] = LiveView()
        try:
            await self.operate(request)
            yield view
        finally:
            self._views.pop(number, None)
            self._end_order(number)

    def _end_order(self, number: int) -> None:
        if not self._in_handshake:
            self._outgoing.end_order(number)
            self._flush_soon()

    def end_views(self, reason: str) -> None:
        """End all live views with an error."""
        while self._views:
            _, view = self._views.popitem()
            view.fail(NotReadyError(reason, retry_ms=RETRY_MS))

    async def ask_resume(self, identity: bytes, timeout_s: float) -> link_pb2.ResumeReply | None:
        """Return the core's log of a request, or None on timeout."""
        if self._in_handshake:
            return None
        number = next(self._question_numbers)
        self._outgoing.ask_resume(number, identity)
        return await self._answer(self._resumes, number, timeout_s)

    async def _answer(
        self, questions: dict[int, "asyncio.Future[AnswerT]"], number: int, timeout_s: float
    ) -> AnswerT | None:
        """Send pending messages and wait for the reply to question `number`; return None on timeout."""
        answer = questions[number] = self._loop.create_future()
        self._flush_soon()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del questions[number]

    # Sending

    def _begin_handshake(self) -> None:
        """Send Hello to the chosen core, or to all schedulers if none is chosen."""
        self._in_handshake = True
        self.end_views("watch: the connection to the scheduler was lost; watch again")
        # Messages for the previous incarnation are dropped. Live streams are resubmitted.
        for submission in self._outgoing.submissions:
            stream = self._streams.get(submission.stream)
            if stream is not None:
                # This submission was never sent, but an earlier one may have been.
                stream.submitted = submission.accepted
        self._outgoing.clear()
        for socket in self._open_sockets:
            self._send_hello(socket, 0)

    @property
    def _open_sockets(self) -> tuple[CoreSocket, ...]:
        return self._sockets if self._chosen is None else (self._chosen,)

    def _send_hello(self, socket: CoreSocket, core: int) -> None:
        """Send Hello; `core` is the incarnation of the core that does not know this front end, or 0."""
        socket.hello_core = core
        hello = link_pb2.FrontendHello(
            protocol_version=LINK_VERSIONS.oldest,
            newest_protocol_version=LINK_VERSIONS.newest,
            frontend_id=self._frontend_id,
            incarnation=socket.incarnation,
        )
        socket.say_hello(link_pb2.FrontendMessage(hello=hello).SerializeToString())

    def _flush_soon(self) -> None:
        if self._chosen is not None:
            self._chosen.flush_soon()

    def _flush_delayed(self) -> None:
        if self._chosen is not None:
            self._chosen.flush_delayed()

    def _report(self) -> link_pb2.MetricReport:
        return link_pb2.MetricReport(families=self._families())

    # Receiving

    def _take_message(self, socket: CoreSocket, payload: bytes) -> None:
        try:
            self._handle(socket, link_pb2.CoreMessage.FromString(payload))
        except (DecodeError, MalformedColumnError, MalformedFrameError) as error:
            self.malformed_messages += 1
            if self.malformed_messages == 1:
                get_logger().error("dropped a malformed message from the scheduler core", error=str(error))

    def _handle(self, socket: CoreSocket, message: link_pb2.CoreMessage) -> None:
        now = time.monotonic()
        self._last_heard = socket.last_heard = now
        if message.unknown:
            if not (self._in_handshake and socket.hello_core == message.incarnation):
                if not self._in_handshake:
                    self._begin_handshake()
                self._send_hello(socket, message.incarnation)
                self._on_state()
            return
        if message.refused:
            if message.refused != self._refused:
                self._refused = message.refused
                get_logger().error("scheduler core refused this front end", reason=message.refused)
                self._on_state()
            return
        if message.HasField("state"):
            if not self._take_state(socket, message, now):
                return
        elif message.incarnation != self._core:
            return  # The message is from an old core, or from a core that has not yet responded to the current Hello.
        self._core_leaves = self._core_leaves or message.leaves
        self._take_scores(message)
        self._take_tokens(message)
        for end in message.ends:
            stream = self._streams.get(end.stream)
            if stream is not None:
                stream.ended_at = now
                stream.finish(end)
        self._take_answers(message)

    def _take_scores(self, message: link_pb2.CoreMessage) -> None:
        for scores in message.scores:
            stream = self._streams.get(scores.stream)
            if stream is not None:
                try:
                    stream.receive_scores(scores.first_index, scores.of_prompt, read_scores(scores.scores))
                except Exception as error:
                    self._fail(stream, error)

    def _take_tokens(self, message: link_pb2.CoreMessage) -> None:
        for number, first_index, token_ids in tokens_by_stream(message) if message.streams else ():
            stream = self._streams.get(number)
            if stream is None:
                continue
            try:
                received = stream.receive(first_index, token_ids)
                if received is not Received.TAKEN:
                    self._react(stream, received)
                elif stream.request.output.stop_strings:
                    # Return credit for tokens that were held back for a stop string and may never be sent to the
                    # client.
                    self.give_credit(stream)
            except Exception as error:
                self._fail(stream, error)

    def _take_answers(self, message: link_pb2.CoreMessage) -> None:
        if message.HasField("snapshot"):
            _resolve(self._snapshots, message.snapshot.request, list(message.snapshot.families))
        for resumed in message.resume_replies:
            _resolve(self._resumes, resumed.number, resumed)
        for reply in message.operator_replies:
            _resolve(self._replies, reply.number, reply)
            if reply.HasField("error") and (failed := self._views.get(reply.number)) is not None:
                failed.fail(operator_error(reply.error))
        for part in message.views:
            view = self._views.get(part.number)
            if view is not None:
                view.put(part)

    def _take_state(self, socket: CoreSocket, message: link_pb2.CoreMessage, now: float) -> bool:
        """Handle the state of a core; return False if the core was replaced by another one."""
        if not self._schedulers.accepts(message.state.leader_number):
            get_logger().warning("left a scheduler that was replaced", leader_number=message.state.leader_number)
            self._last_heard = float("-inf")
            self._disconnected(socket)
            return False
        model = message.state.model
        if model.max_model_len > MAX_SEQUENCE or model.vocab_size > MAX_VOCABULARY:
            raise MalformedFrameError("state.model: max_model_len or vocab_size exceeds the limits")
        self._state = message.state
        if self._chosen is None:
            self._chosen, socket.is_chosen = socket, True
            for each in self._sockets:
                if each is not socket:
                    each.disconnect()
        # The core accepts this front end again, because it reports its state only to accepted front ends.
        self._refused = ""
        if message.state.log_level in LEVELS:
            set_level(message.state.log_level)
        if message.state.HasField("model"):
            self._model = model
        if self._in_handshake or message.incarnation != self._core:
            self.protocol_version = message.protocol_version or LINK_VERSIONS.oldest
            if self._core not in (0, message.incarnation):
                self.num_restarts += 1
                self.num_orderly_restarts += self._core_leaves
                get_logger().warning(
                    "scheduler core restarted; submitting live streams again", live_streams=len(self._streams)
                )
            self._core = message.incarnation
            self._core_leaves = False
            self._in_handshake = False
            for stream in self._streams.values():
                try:
                    self._submit_again(stream, now)
                except Exception as error:
                    self._fail(stream, error)
        self._on_state()
        return True

    def _react(self, stream: Stream, received: Received) -> None:
        if received is Received.MATCHED:
            self._outgoing.stop_match(stream.number, stream.keep_tokens)
            self._flush_soon()
            return
        get_logger().error(
            "tokens are missing in a stream; submitting its request again",
            request_id=stream.request.spec.request_id,
            stream=stream.number,
        )
        del self._streams[stream.number]
        self._outgoing.cancel(stream.number)
        self.submit(stream)

    def _submit_again(self, stream: Stream, now: float) -> None:
        if stream.over:
            return
        self._outgoing.submit(stream.submission(now))
        if stream.stop_string is not None:
            self._outgoing.stop_match(stream.number, stream.keep_tokens)
        self._flush_soon()

    def _fail(self, stream: Stream, error: Exception) -> None:
        """End one stream with an internal error; the others are not affected."""
        fault = InternalError(draw_error_id())
        get_logger().error(
            "stream failed", request_id=stream.request.spec.request_id, error_id=fault.error_id, exc_info=error
        )
        stream.fail(fault)

    # Time

    async def _tick_forever(self) -> None:
        was_ready = False
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._tick(time.monotonic())
            if was_ready != self.ready:
                was_ready = self.ready
                self._on_state()

    def _disconnected(self, socket: CoreSocket) -> None:
        """Reconnect, at most once per `RECONNECT_EVERY_S`."""
        wait = socket.connected_at + RECONNECT_EVERY_S - time.monotonic()
        self._loop.call_later(max(0.0, wait), self._start_over, socket, socket.incarnation)

    def _start_over(self, socket: CoreSocket, incarnation: int) -> None:
        """Replace a connection if it still has this incarnation, and all connections if it is the chosen one."""
        if incarnation != socket.incarnation or socket.closed:
            return
        if socket is self._chosen:
            self._chosen = None
            for each in self._sockets:
                each.reconnect()
            self._begin_handshake()
        else:
            socket.reconnect()
            self._send_hello(socket, 0)

    def _tick(self, now: float) -> None:
        stalls = self._stall_until(now)
        self._stalls += stalls
        self._ticked_at = now
        for socket in self._open_sockets:
            # After a stall of this process, unprocessed messages from the core may be waiting.
            if not stalls and now - max(socket.last_heard, socket.connected_at) > SILENCE_TIMEOUT_S:
                self._start_over(socket, socket.incarnation)
            elif self._in_handshake:
                self._send_hello(socket, socket.hello_core)
            else:
                self._outgoing.report(self._report())
                self._flush_soon()
        if self.connected and not self._in_handshake:
            self._away_since = now
        elif now - self._away_since > GIVE_UP_S:
            for stream in list(self._streams.values()):
                stream.fail(NoWorkerError("scheduler unreachable for too long; send the request again", retry_ms=1000))


def _resolve(questions: dict[int, "asyncio.Future[AnswerT]"], number: int, value: AnswerT) -> None:
    answer = questions.get(number)
    if answer is not None and not answer.done():
        answer.set_result(value)
