"""The front end's end of the link to the scheduler core: what is said to it, and what it says, over a `CoreSocket`.

Greeting: hello is sent at the start and whenever the core says that it does not know us; until its state arrives in
answer, nothing else is sent, and every live stream is then submitted, with the tokens it has. That one rule covers a
core that starts late, restarts, or gave up on us. What the new core sends again is recognised by its index; a gap makes
the stream a new one under a new number, so that late answers to the old number mean nothing.

The core answers every report, about once a second. When nothing came for `AWAY_S` the service is not ready and the link
starts over as a new incarnation; clients keep their streams, and only after `GIVE_UP_S` these end with an error.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from services.core_socket import CoreSocket
from services.errors import InternalError
from services.incoming import tokens_by_stream
from services.logprobs import read_scores
from services.outgoing import Outgoing
from services.stream import Received, Stream
from shared.columns import MalformedColumnError
from shared.errors import NoWorkerError
from shared.frames import LINK_VERSIONS, MAX_SEQUENCE, MAX_VOCABULARY, MalformedFrameError
from shared.ids import draw_error_id
from shared.logging import LEVELS, get_logger, set_level
from shared.sockets import Protect

REPORT_EVERY_S = 1.0
AWAY_S = 3.0
GIVE_UP_S = 60.0

_MAX_STREAM_NUMBER = 0x7FFFFFFF

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
        self._frontend_id = frontend_id
        self._loop = asyncio.get_running_loop()
        self._families = families
        self._on_state = on_state
        self._outgoing = Outgoing()
        self._socket = CoreSocket(
            address, frontend_id, take=self._outgoing.take, on_message=self._take_message, protect=protect
        )
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
        self._socket.start()
        self._greet(0)
        self._ticking = self._loop.create_task(self._tick_forever())

    async def close(self) -> None:
        """Sends what is pending, as far as the core takes it at once, says goodbye, and leaves."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        if not self._greeting:
            self._outgoing.goodbye()
        self._socket.close()

    def submit(self, stream: Stream, *, again: bool = False) -> None:
        """Hands a new stream to the core; `again`: one whose request a core may know."""
        stream.number = next(number for number in self._numbers if number not in self._streams)
        if not self._greeting:
            self._outgoing.submit(stream.submission(time.monotonic(), again=again))
            self._socket.flush_soon()
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
            self._socket.flush_soon()

    def give_credit(self, stream: Stream) -> None:
        """Returns the credit of what the reader took."""
        due = stream.credit_due()
        if due and not self._greeting:
            self._outgoing.credit(stream.number, due)
            self._socket.flush_in_a_moment()

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
        self._socket.flush_soon()
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        finally:
            del questions[number]

    # Sending

    def _greet(self, core: int) -> None:
        self._greeting, self._greeted = True, core
        # Whatever was meant for another incarnation is void; live streams are submitted again.
        self._socket.forget_unsent()
        self._outgoing.clear()
        self._outgoing.hello(
            link_pb2.FrontendHello(
                protocol_version=LINK_VERSIONS.oldest,
                newest_protocol_version=LINK_VERSIONS.newest,
                frontend_id=self._frontend_id,
                incarnation=self._socket.incarnation,
            )
        )
        self._socket.flush_soon()

    def _report(self) -> link_pb2.MetricReport:
        return link_pb2.MetricReport(families=self._families())

    # Receiving

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
        self._take_scores(message)
        self._take_tokens(message, now)
        for end in message.ends:
            stream = self._streams.get(end.stream)
            if stream is not None:
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

    def _take_tokens(self, message: link_pb2.CoreMessage, now: float) -> None:
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

    def _take_answers(self, message: link_pb2.CoreMessage) -> None:
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
            self._socket.flush_soon()
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
        self._socket.flush_soon()

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
        if now - max(self._last_heard, self._socket.connected_at) > AWAY_S:
            self._socket.reconnect()
            self._greet(0)
        elif self._greeting:
            self._greet(self._greeted)
        else:
            self._outgoing.report(self._report())
            self._socket.flush_soon()
        if self.connected:
            self._away_since = now
        elif now - self._away_since > GIVE_UP_S:
            for stream in list(self._streams.values()):
                stream.fail(NoWorkerError("the scheduler has been away for too long", retry_ms=1000))


def _resolve(questions: dict[int, "asyncio.Future[AnswerT]"], number: int, value: AnswerT) -> None:
    answer = questions.get(number)
    if answer is not None and not answer.done():
        answer.set_result(value)
