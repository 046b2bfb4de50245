"""Delivers the streams of one request to the client, with flow control.

Each protocol provides a `Send`, which writes one message and returns when the message has been sent. Slow clients are
therefore detected in the same way for all protocols. When one stream fails or the caller disconnects, all streams of
the request end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import Span

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.parts import to_part
from services.calls.tracing import describe_answer
from services.calls.wakeup import Wakeup
from services.errors import error_of, finish_reason
from services.metrics import Output
from services.streams.logprobs import token_logprobs
from services.streams.outbox import Batch
from services.streams.stream import Stream
from services.tail import note_stream
from shared.errors import QuireError, StalledReaderError
from shared.metrics import SpanRef, span_ref

FINAL_WRITE_TIMEOUT_S = 1.0
"""Maximum time for which a client may take to read the last messages before an error, s."""
Send = Callable[[v1.GenerateResponse], Awaitable[object]]
"""Writes a message; returns when the message has been sent, so that the writer waits for a slow client."""


def without_output(send: Send) -> Send:
    """Return a `Send` that omits generated output, so that the response ends with the prompt."""

    async def send_rest(message: v1.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "delta":
                return
            case "choice_finished":
                _end_at_prompt(message.choice_finished)
                message.choice_finished.completion_tokens = 0
            case "finished":
                _end_at_prompt(message.finished)
                message.finished.usage.completion_tokens = 0
        await send(message)

    return send_rest


def _end_at_prompt(end: v1.ChoiceFinished | v1.Finished) -> None:
    end.reason = v1.FINISH_REASON_LENGTH
    end.ClearField("stop_string")
    end.ClearField("stop_token_id")


class Delivery:
    """Delivers the output of streams."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def serve(
        self,
        choices: "Choices",
        wakeup: Wakeup,
        span: Span,
        send: Send,
        begin: Callable[[], Awaitable[None]],
        *,
        keep: bool,
    ) -> None:
        """Call `begin` to submit the streams, then deliver their output; with `keep`, the client may resume later."""
        services, streams = self._services, choices.streams
        is_gone, is_complete, is_error = True, False, False
        reference = span_ref(span)
        try:
            await self._serve(choices, wakeup, span, send, begin, reference)
            is_complete = True
        except TimeoutError:
            is_error = True
            raise failure_of(streams) or StalledReaderError(
                "the client read no data for too long; read the stream without long pauses"
            ) from None
        except QuireError:
            is_gone, is_error = False, True
            raise
        except Exception:
            is_error = True
            raise
        except asyncio.CancelledError as cancelled:
            # The task refers to this error, whose traceback refers to the task and to the request. Such a cycle would
            # keep the request alive until the next garbage collection.
            raise cancelled.with_traceback(None) from None
        finally:
            for stream, watch in zip(streams, choices.watches, strict=True):
                stream.on_end = None  # The callback refers to the stream.
                now = time.monotonic()
                stalled_s = services.link.stalled_s(stream.request.arrival, now)
                services.link.report_call(watch.report(stream, now, stalled_s))
                services.link.release(stream, keep=keep and is_gone)
                services.metrics.generation_tokens.add(stream.num_sent, choices.model)
                services.metrics.merged_tokens.add(stream.merged_tokens)
                reason = choices.reason(stream) if is_complete else "error" if is_error else "abort"
                output = choices.output(stream, reason, reference)
                services.metrics.output_ended(output)
                note_stream(span, stream.number, output)

    async def _serve(
        self,
        choices: "Choices",
        wakeup: Wakeup,
        span: Span,
        send: Send,
        begin: Callable[[], Awaitable[None]],
        reference: SpanRef | None,
    ) -> None:
        """Submit the streams and deliver their output, with a time limit for the reader once all streams have ended.

        gRPC waits forever for a client that does not read. While a stream is live, the core detects such a client,
        because no credit returns. After the stream's end, sending the remaining output has a time limit.
        """
        async with asyncio.timeout(None) as patience:
            for stream in choices.streams:
                stream.on_end = partial(self._limit, patience, choices.streams)
            await begin()
            # Every message resumes its task twice, and each resumption passes through all nested coroutines. A separate
            # task has about ten fewer of them.
            await asyncio.create_task(self._pass_on(choices, wakeup, patience, send, reference))
            finished = choices.finished(span)
            written = time.monotonic()
            await send(finished)
            choices.watches[-1].client_s += time.monotonic() - written

    def _limit(self, patience: asyncio.Timeout, streams: list[Stream]) -> None:
        """Limit how long the client of an ended request may take to read its next message."""
        failure = failure_of(streams)
        if failure is None and not all(stream.over for stream in streams):
            return
        seconds = self._services.config.stall_timeout_s if failure is None else FINAL_WRITE_TIMEOUT_S
        if seconds > 0:
            patience.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _pass_on(
        self, choices: "Choices", wakeup: Wakeup, patience: asyncio.Timeout, send: Send, span: SpanRef | None
    ) -> None:
        """Write the streams' output until all have ended, one message at a time.

        Raises:
            QuireError: a stream ended with an error.
        """
        link = self._services.link
        latencies = self._services.metrics.latencies(choices.operation, choices.model)
        gaps, streams, watches = latencies.token_gap, choices.streams, choices.watches
        live = list(streams)
        while live:
            idle = True
            for stream in live:
                began = time.monotonic()
                batch = stream.take()
                if batch is None:
                    continue
                idle = False
                response = self._response(stream, batch)
                written = time.monotonic()
                await send(response)
                watch, now = watches[stream.request.choice], time.monotonic()
                if stream.ended_at:
                    watch.sent_after_end(began, written, now, stream.ended_at)
                else:
                    watch.client_before_s += now - written
                if stream.over:
                    self._limit(patience, streams)
                if stream.taken():
                    link.give_credit(stream)
                if not batch.token_ids:
                    continue
                if watch.last:
                    gaps.observe(now - watch.last, span=span)
                else:
                    watch.first = now
                    latencies.first_token(now - stream.request.arrival, span)
                watch.last = now
                if len(batch.token_ids) > 1:
                    # All tokens of a message arrive at the client at the same time.
                    gaps.observe(0.0, len(batch.token_ids) - 1)
            if not idle:
                continue
            ended = [stream for stream in live if stream.over]
            if not ended:
                await wakeup.rung()
                continue
            failure = failure_of(ended)
            if failure is not None:
                raise failure
            for stream in ended:
                live.remove(stream)
                if len(streams) > 1:
                    await send(v1.GenerateResponse(choice_finished=choices.choice_finished(stream)))

    def _response(self, stream: Stream, batch: Batch) -> v1.GenerateResponse:
        """Return a batch of a stream as a response message."""
        request, response = stream.request, v1.GenerateResponse()
        # Filling the message in place takes half the time of passing a Delta to the constructor.
        delta = response.delta
        if request.choice:
            delta.choice = request.choice
        delta.first_index = batch.first_index
        delta.token_ids.extend(batch.token_ids)
        delta.text = batch.text
        output = request.output
        if batch.events:
            delta.parts.extend(map(to_part, batch.events))
        elif output.parse and batch.text and not stream.has_parser:
            delta.parts.add().content = batch.text
        if output.logprobs:
            tokenizer = self._services.tokenizer
            for index, token_id in enumerate(batch.token_ids, batch.first_index):
                delta.logprobs.append(token_logprobs(token_id, stream.scores.pop(index, None), tokenizer))
        return response


@dataclass(slots=True)
class Watch:
    """When output was sent, and how long the call spent in the front end, s; see `quire.link.v1.RequestReport`."""

    detokenise_s: float = 0.0
    client_s: float = 0.0
    client_before_s: float = 0.0
    first: float = 0.0
    """Monotonic time when the first token was written; 0 if none was."""
    last: float = 0.0
    """Monotonic time when the last token was written."""

    def sent_after_end(self, began: float, written: float, sent: float, ended_at: float) -> None:
        """Count a message that was sent after the core reported the stream's end.

        Args:
            began: when taking its batch began, s.
            written: when it was written.
            sent: when it was sent.
            ended_at: when the core reported the end.
        """
        self.detokenise_s += max(0.0, written - max(began, ended_at))
        self.client_s += max(0.0, sent - max(written, ended_at))
        self.client_before_s += max(0.0, min(sent, ended_at) - written)

    def report(self, stream: Stream, now: float, stalled_s: float) -> link_pb2.RequestReport:
        """Return the report for a stream whose call ends now.

        `stalled_s` is how long this process stalled during the call.
        """
        request, submitted = stream.request, stream.submitted_at or now
        return link_pb2.RequestReport(
            stream=stream.number,
            submitted_us=_microseconds(submitted - request.arrival),
            tokenise_us=_microseconds(request.tokenise_s),
            grammar_us=_microseconds(request.grammar_s),
            ended_us=_microseconds(stream.ended_at - submitted) if stream.ended_at else 0,
            finished_us=_microseconds(now - submitted),
            detokenise_us=_microseconds(self.detokenise_s),
            client_us=_microseconds(self.client_s),
            client_before_us=_microseconds(self.client_before_s),
            stalled_us=_microseconds(stalled_s),
        )


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


@dataclass(frozen=True, slots=True)
class Choices:
    """The streams of one request, and the messages that report their ends."""

    streams: list[Stream]
    """The streams, by choice index."""
    model: str
    request_id: str
    operation: str
    """`gen_ai.operation.name`."""
    watches: list[Watch] = field(init=False)

    def __post_init__(self) -> None:
        """Start one watch per stream."""
        object.__setattr__(self, "watches", [Watch() for _ in self.streams])

    def reason(self, stream: Stream) -> str:
        """Return why a stream of a successful request ended: "stop" or "length"."""
        return _reason_name(self.choice_finished(stream).reason)

    def output(self, stream: Stream, reason: str, span: SpanRef | None) -> Output:
        """Return the metrics of an ended stream."""
        request, watch = stream.request, self.watches[stream.request.choice]
        arrival, due = request.arrival, request.due
        return Output(
            model=self.model,
            operation=self.operation,
            tenant=request.spec.tenant,
            reason=reason,
            prompt_tokens=request.spec.num_prompt_tokens,
            output_tokens=stream.num_sent,
            elapsed=time.monotonic() - arrival,
            first=watch.first - arrival if watch.first else None,
            last=watch.last - arrival if watch.last else None,
            queued=0.0 if stream.end is None else stream.end.queued_ns / 1e9,
            energy_j=0.0 if stream.end is None else stream.end.energy_j,
            first_target=None if due.first_token is None else due.first_token - arrival,
            total_target=None if due.last_token is None else due.last_token - arrival,
            span=span,
        )

    def choice_finished(self, stream: Stream) -> v1.ChoiceFinished:
        """Return the message for a choice that ended successfully."""
        end = stream.end
        assert end is not None, "a stream that is over without an error was ended by the core"
        reason = finish_reason(end)
        assert reason is not None, "a stream that the core ended with an error does not finish"
        finished = v1.ChoiceFinished(
            choice=stream.request.choice, reason=reason, completion_tokens=end.completion_tokens
        )
        if stream.stop_string is not None:
            # The core may have ended the stream for another reason before the stop match reached the core.
            finished.reason = v1.FINISH_REASON_STOP
            finished.stop_string = stream.stop_string
            finished.completion_tokens = stream.keep_tokens
        elif end.reason == link_pb2.END_REASON_STOP:
            finished.stop_token_id = end.stop_token_id
        return finished

    def finished(self, span: Span) -> v1.GenerateResponse:
        """Return the last message for a successful request."""
        response = v1.GenerateResponse()
        finished = response.finished
        finished.request_id, finished.model = self.request_id, self.model
        ended = [self.choice_finished(stream) for stream in self.streams]
        first = ended[0]
        finished.reason = first.reason
        match first.WhichOneof("stop"):
            case "stop_string":
                finished.stop_string = first.stop_string
            case "stop_token_id":
                finished.stop_token_id = first.stop_token_id
        ends = [stream.end for stream in self.streams if stream.end is not None]
        request = self.streams[0].request
        usage = finished.usage
        usage.prompt_tokens = request.spec.num_prompt_tokens
        usage.completion_tokens = sum(choice.completion_tokens for choice in ended)
        usage.cached_prompt_tokens = ends[0].cached_prompt_tokens
        usage.preemptions = sum(end.preemptions for end in ends)
        usage.energy_j = sum(end.energy_j for end in ends)
        finished.timings.queued.FromNanoseconds(ends[0].queued_ns)
        firsts = [watch.first for watch in self.watches if watch.first]
        if firsts:
            finished.timings.first_token.FromNanoseconds(int((min(firsts) - request.arrival) * 1e9))
        finished.timings.total.FromNanoseconds(int((time.monotonic() - request.arrival) * 1e9))
        describe_answer(span, finished, [_reason_name(choice.reason) for choice in ended], ends)
        return response


def _reason_name(reason: v1.FinishReason.ValueType) -> str:
    return v1.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def failure_of(streams: Sequence[Stream]) -> QuireError | None:
    """Return the error of the first failed stream, or None."""
    for stream in streams:
        if stream.error is not None:
            return stream.error
        if stream.end is not None and finish_reason(stream.end) is None:
            return error_of(stream.end)
    return None
