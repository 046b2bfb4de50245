"""The front end's end of the link to the scheduler core: one DEALER socket inside the event loop.

Greeting: hello is sent at the start and whenever the core says that it does not know us; until its state arrives in
answer, nothing else is sent, and every live stream is then submitted, with the tokens it has. That one rule covers a
core that starts late, restarts, or gave up on us. What the new core sends again is recognised by its index; a gap makes
the stream a new one under a new number, so that late answers to the old number mean nothing.

The core answers every report, about once a second. When nothing came for `AWAY_S` the service is not ready and the link
starts over as a new incarnation; clients keep their streams, and only after `GIVE_UP_S` these end with an error.

grpc.aio handles one completion, be it a written message or a new call, per turn of the loop, and gRPC cancels calls
that were not accepted for 30 s. So turns must be short whatever the core does: reading is rationed, and credit, of
which every written message returns some, is gathered for a moment; everything else leaves at the end of the turn, in
one message.

The socket's descriptor is edge-triggered: after every send, and whenever the descriptor fires, it is read until nothing
is left. (`zmq.asyncio` would do this for us, at 25 µs a message instead of 1.)
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from services.errors import InternalError
from services.incoming import tokens_by_stream
from services.logprobs import read_scores
from services.outgoing import Outgoing
from services.stream import Received, Stream
from shared.columns import MalformedColumnError
from shared.errors import NoWorkerError
from shared.frames import LINK_VERSIONS, MAX_SEQUENCE, MAX_VOCABULARY, MalformedFrameError
from shared.ids import draw_error_id, draw_incarnation, routing_id
from shared.logging import LEVELS, get_logger, set_level
from shared.sockets import LINK_MAX_MESSAGE, Protect, connect_dealer

REPORT_EVERY_S = 1.0
AWAY_S = 3.0
GIVE_UP_S = 60.0

_READ_FOR_S = 0.001
"""How long messages are read in one go."""
_REST = 3
"""After a go that left something unread, gRPC has the loop for so many times as long."""
_CREDIT_DELAY_S = 0.001
"""Credit may wait for so long for more of it."""
_MAX_STREAM_NUMBER = 0x7FFFFFFF
_CLOSE_LINGER_MS = 200

Families = list[link_pb2.MetricFamily]
AnswerT = TypeVar("AnswerT")


class CoreLink:
    """Streams by number, and the core's last known state."""

    def __init__(
        self,
        address: str,
        frontend_id: str,
        *,
        families: Callable[[], Families],
        on_state: Callable[[], None],
        protect: Protect = lambda _socket: None,
    ) -> None:
        """`families` gives the front end's own metrics; `on_state` is called when `ready` may have changed; `protect`
        encrypts each new socket."""
        self._protect = protect
        self._address = address
        self._frontend_id = frontend_id
        self._context = zmq.Context()
        self._connect()
        self._loop = asyncio.get_running_loop()
        self._families = families
        self._on_state = on_state
        self._outgoing = Outgoing()
        self._unsent: list[bytes] = []
        """Serialized messages that the socket did not take, oldest first; nothing new is serialized meanwhile."""
        self._flush_scheduled = False
        self._credit_scheduled = False
        self._read_scheduled = False
        """A read is on its way; until then the descriptor is not listened to."""
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.cycle(range(1, _MAX_STREAM_NUMBER))
        self._snapshots: dict[int, asyncio.Future[Families]] = {}
        self._replies: dict[int, asyncio.Future[link_pb2.OperatorReply]] = {}
        self._resumes: dict[int, asyncio.Future[link_pb2.ResumeReply]] = {}
        self._question_numbers = itertools.count(1)
        self._core = 0
        """Incarnation of the core that knows us."""
        self._greeting = False
        """Hello is on its way; nothing else is sent."""
        self._greeted = 0
        """Incarnation of the core whose `unknown` the hello on its way answers."""
        self._last_heard = float("-inf")
        self._away_since = time.monotonic()
        self._state = link_pb2.ServiceState()
        self._model: link_pb2.ServedModel | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False
        self._refused = ""
        """Why the core does not want us, if it does not."""
        self.protocol_version = LINK_VERSIONS.oldest
        """What is spoken with the core; nothing that a newer version adds is used."""
        self.malformed_messages = 0

    @property
    def connected(self) -> bool:
        """The core was heard of lately and knows us."""
        return not self._greeting and time.monotonic() - self._last_heard < AWAY_S

    @property
    def ready(self) -> bool:
        """Requests would be served now."""
        return self.connected and self._state.ready

    @property
    def model(self) -> link_pb2.ServedModel | None:
        """The served model, the last one heard of; None until a first worker has joined.

        A core that was started again knows of no model before workers have come back. Requests for the one before it
        are welcome all the same: how long they wait for a worker is the core's decision.
        """
        return self._model

    def start(self) -> None:
        """Begins to talk; the core need not be there yet."""
        self._loop.add_reader(self._option(zmq.FD), self._read_on_edge)
        self._greet(0)
        self._ticking = self._loop.create_task(self._tick_forever())

    async def close(self) -> None:
        """Sends what is pending, as far as the core takes it at once, says goodbye, and leaves."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if not self._greeting:
            self._outgoing.goodbye()
        self._flush()
        self._closed = True
        self._loop.remove_reader(self._option(zmq.FD))
        self._socket.close(linger=_CLOSE_LINGER_MS)
        self._context.term()

    def submit(self, stream: Stream, *, again: bool = False) -> None:
        """Hands a new stream to the core; `again`: one whose request a core may know."""
        stream.number = next(number for number in self._numbers if number not in self._streams)
        if not self._greeting:
            self._outgoing.submit(stream.submission(time.monotonic(), again=again))
            self._schedule_flush()
        self._streams[stream.number] = stream

    def release(self, stream: Stream, *, keep: bool = False) -> None:
        """The stream's reader is done. Unless the core has ended the stream, it is told that the client has gone.

        `keep`: the client may come back.
        """
        if self._streams.pop(stream.number, None) is not None and stream.end is None and not self._greeting:
            if keep:
                self._outgoing.detach(stream.number)
            else:
                self._outgoing.cancel(stream.number)
            self._schedule_flush()

    def give_credit(self, stream: Stream) -> None:
        """Returns the credit of what the reader took."""
        due = stream.credit_due()
        if due and not self._greeting:
            self._outgoing.credit(stream.number, due)
            if not self._credit_scheduled:
                self._credit_scheduled = True
                self._loop.call_later(_CREDIT_DELAY_S, self._flush_credit)

    async def snapshot(self, timeout_s: float) -> Families | None:
        """The metrics of the whole service, or None when the core does not answer in time."""
        if self._greeting:
            return None
        number = next(self._question_numbers)
        self._outgoing.report(self._report(), snapshot_request=number)
        return await self._answer(self._snapshots, number, timeout_s)

    async def operate(self, request: link_pb2.OperatorRequest, timeout_s: float) -> link_pb2.OperatorReply | None:
        """Asks the core what an operator asks, or None when it does not answer in time."""
        if self._greeting:
            return None
        request.number = next(self._question_numbers)
        self._outgoing.operate(request)
        return await self._answer(self._replies, request.number, timeout_s)

    async def ask_resume(self, identity: bytes, timeout_s: float) -> link_pb2.ResumeReply | None:
        """What the core keeps of a request, or None when it does not answer in time."""
        if self._greeting:
            return None
        number = next(self._question_numbers)
        self._outgoing.ask_resume(number, identity)
        return await self._answer(self._resumes, number, timeout_s)

    async def _answer(
        self, questions: dict[int, "asyncio.Future[AnswerT]"], number: int, timeout_s: float
    ) -> AnswerT | None:
        """Sends what is pending and waits for the answer to question `number`."""
        answer = questions[number] = self._loop.create_future()
        self._schedule_flush()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del questions[number]

    # Connecting

    def _connect(self) -> None:
        """Opens a socket under an incarnation of its own."""
        self._incarnation = draw_incarnation()
        self._connected_at = time.monotonic()
        self._socket = connect_dealer(
            self._context,
            self._address,
            identity=routing_id(self._frontend_id, self._incarnation),
            max_message=LINK_MAX_MESSAGE,
            queue_while_away=False,
            protect=self._protect,
        )

    def _connect_again(self) -> None:
        """Starts over as a new incarnation.

        ZeroMQ reconnects by itself, but under the old routing id: a ROUTER that has not noticed the loss (heartbeats
        may be late for want of a CPU) takes the new connection for an impostor's and ignores it for good.
        """
        self._loop.remove_reader(self._option(zmq.FD))
        self._socket.close(linger=0)
        self._connect()
        self._loop.add_reader(self._option(zmq.FD), self._read_on_edge)
        self._greet(0)

    # Sending

    def _greet(self, core: int) -> None:
        self._greeting, self._greeted = True, core
        # Whatever was meant for another incarnation is void; live streams are submitted again.
        self._unsent.clear()
        self._outgoing.clear()
        self._outgoing.hello(
            link_pb2.FrontendHello(
                protocol_version=LINK_VERSIONS.oldest,
                newest_protocol_version=LINK_VERSIONS.newest,
                frontend_id=self._frontend_id,
                incarnation=self._incarnation,
            )
        )
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush_credit(self) -> None:
        self._credit_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._closed:
            return
        self._flush_scheduled = False
        if not self._unsent:
            self._unsent = self._outgoing.take()
        try:
            while self._unsent:
                self._socket.send(self._unsent[0], flags=zmq.DONTWAIT)
                del self._unsent[0]
        except zmq.Again:
            pass  # `_read_now` comes by when the socket takes more, the tick when it does not
        self._read_if_due()

    def _option(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    def _report(self) -> link_pb2.MetricReport:
        return link_pb2.MetricReport(families=self._families())

    # Receiving

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
                self._take_message(self._socket.recv(flags=zmq.DONTWAIT))
                now = time.monotonic()
        except zmq.Again:
            pass
        if self._unsent and self._option(zmq.EVENTS) & zmq.POLLOUT:
            self._schedule_flush()
        self._read_if_due(_REST * (now - begin))

    def _take_message(self, payload: bytes) -> None:
        try:
            message = link_pb2.CoreMessage.FromString(payload)
            self._handle(message)
        except (DecodeError, MalformedColumnError, MalformedFrameError) as error:
            self.malformed_messages += 1
            if self.malformed_messages == 1:
                get_logger().error("malformed message from the core dropped", error=str(error))

    def _handle(self, message: link_pb2.CoreMessage) -> None:
        now = time.monotonic()
        self._last_heard = now
        if message.unknown:
            if not (self._greeting and self._greeted == message.incarnation):
                self._greet(message.incarnation)
                self._on_state()
            return
        if message.refused:
            if message.refused != self._refused:
                self._refused = message.refused
                get_logger().error("refused by the scheduler", reason=message.refused)
            return
        if message.HasField("state"):
            self._take_state(message, now)
        elif message.incarnation != self._core:
            return  # from a core that is gone, or one that has not answered our hello yet
        for scores in message.scores:
            stream = self._streams.get(scores.stream)
            if stream is not None:
                try:
                    stream.receive_scores(scores.first_index, scores.of_prompt, read_scores(scores.scores))
                except Exception as error:
                    self._fail(stream, error)
        for number, first_index, token_ids in tokens_by_stream(message) if message.streams else ():
            stream = self._streams.get(number)
            if stream is None:
                continue
            try:
                received = stream.receive(first_index, token_ids, now)
                if received is not Received.TAKEN:
                    self._react(stream, received)
                elif stream.request.stop_strings:
                    self.give_credit(stream)  # a stop string may hold back tokens that no reader will take
            except Exception as error:
                self._fail(stream, error)
        for end in message.ends:
            stream = self._streams.get(end.stream)
            if stream is not None:
                stream.finish(end)
        if message.HasField("snapshot"):
            _resolve(self._snapshots, message.snapshot.request, list(message.snapshot.families))
        for resumed in message.resume_replies:
            _resolve(self._resumes, resumed.number, resumed)
        for reply in message.operator_replies:
            _resolve(self._replies, reply.number, reply)

    def _take_state(self, message: link_pb2.CoreMessage, now: float) -> None:
        model = message.state.model
        if model.max_model_len > MAX_SEQUENCE or model.vocab_size > MAX_VOCABULARY:
            raise MalformedFrameError("a model whose sequences or vocabulary are beyond belief")
        self._state = message.state
        if message.state.log_level in LEVELS:
            set_level(message.state.log_level)
        if message.state.HasField("model"):
            self._model = model
        if self._greeting or message.incarnation != self._core:
            self.protocol_version = message.protocol_version or LINK_VERSIONS.oldest
            self._refused = ""
            if self._core not in (0, message.incarnation):
                get_logger().warning("the scheduler core is a new one", live_streams=len(self._streams))
            self._core = message.incarnation
            self._greeting = False
            for stream in self._streams.values():
                try:
                    self._submit_again(stream, now)
                except Exception as error:
                    self._fail(stream, error)
        self._on_state()

    def _react(self, stream: Stream, received: Received) -> None:
        if received is Received.MATCHED:
            self._outgoing.stop_match(stream.number, stream.keep_tokens)
            self._schedule_flush()
            return
        get_logger().error("tokens are missing", request_id=stream.request.request_id, stream=stream.number)
        del self._streams[stream.number]
        self._outgoing.cancel(stream.number)
        self.submit(stream, again=True)

    def _submit_again(self, stream: Stream, now: float) -> None:
        if stream.over:
            return
        self._outgoing.submit(stream.submission(now, again=True))
        if stream.stop_string is not None:
            self._outgoing.stop_match(stream.number, stream.keep_tokens)
        self._schedule_flush()

    def _fail(self, stream: Stream, error: Exception) -> None:
        """A fault of ours in one stream ends that stream and none of the others."""
        fault = InternalError(draw_error_id())
        get_logger().error(
            "stream failed", request_id=stream.request.request_id, error_id=fault.error_id, exc_info=error
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

    def _tick(self, now: float) -> None:
        if now - max(self._last_heard, self._connected_at) > AWAY_S:
            self._connect_again()
        elif self._greeting:
            self._greet(self._greeted)
        else:
            self._outgoing.report(self._report())
            self._schedule_flush()
        if self.connected:
            self._away_since = now
        elif now - self._away_since > GIVE_UP_S:
            for stream in list(self._streams.values()):
                stream.fail(NoWorkerError("the scheduler has been away for too long", retry_ms=1000))


def _resolve(questions: dict[int, "asyncio.Future[AnswerT]"], number: int, value: AnswerT) -> None:
    answer = questions.get(number)
    if answer is not None and not answer.done():
        answer.set_result(value)
