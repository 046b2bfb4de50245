"""The calls of `quire.v1.GenerationService`: validate, tokenise, submit, and pass on what the stream yields."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Span, Tracer

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.boundary import Context, cancel_code
from services.chat_template import ChatTemplateError
from services.core_link import CoreLink
from services.errors import RETRY_MS, error_of, finish_reason
from services.metrics import FrontendMetrics
from services.scheduling import block_keys, wishes
from services.stream import Stream, StreamRequest
from services.tokenizer import TextTokenizer
from services.tracing import TRACEPARENT_KEY, describe_answer, describe_request, server_span
from services.validation import ValidRequest, check_chat, check_model, check_text, check_token_ids, fit, validate
from services.wakeup import Wakeup
from shared.columns import to_column
from shared.config import FrontendConfig
from shared.errors import (
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    QuireError,
    StalledReaderError,
)
from shared.logging import get_logger
from shared.telemetry import to_traceparent

REQUEST_ID_KEY = "quire-request-id"
"""The initial metadata entry with the id a request runs under."""
FAREWELL_S = 1.0
"""How long the reader of a stream that ended with an error has for what came before the error."""
ANONYMOUS = "anonymous"
"""The principal of calls without authentication."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the servicers work with."""

    config: FrontendConfig
    link: CoreLink
    tokenizer: TextTokenizer
    metrics: FrontendMetrics
    tracer: Tracer

    def served_model(self) -> link_pb2.ServedModel:
        """The served model.

        Raises:
            NotReadyError: no worker has joined yet.
        """
        model = self.link.model
        if model is None:
            raise NotReadyError("no worker has joined yet; try again in a moment", retry_ms=RETRY_MS)
        return model


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one front-end process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live: set[tuple[str, str]] = set()
        """(principal, request id) of the calls in progress."""
        self.idle = asyncio.Event()
        """Set while no call is in progress."""
        self.idle.set()

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Generates from one prompt; see the proto."""
        arrival = time.monotonic()
        metadata = dict(context.invocation_metadata() or ())
        with server_span(self._services.tracer, str(metadata.get(TRACEPARENT_KEY, ""))) as span:
            model = self._services.served_model()
            valid = validate(request, model, has_chat_template=self._services.tokenizer.has_chat_template)
            self._claim(valid.request_id)
            outcome = ""
            try:
                await context.send_initial_metadata(((REQUEST_ID_KEY, valid.request_id),))
                await self._run(request, valid, model, arrival, span, context)
                outcome = "OK"
            except QuireError as error:
                outcome = error.code
                raise
            except Exception:
                outcome = "INTERNAL"
                raise
            finally:
                self._release(valid.request_id)
                elapsed = time.monotonic() - arrival
                self._services.metrics.duration.observe(elapsed)
                get_logger().info(
                    "request ended",
                    request_id=valid.request_id,
                    outcome=outcome or cancel_code(context),
                    seconds=round(elapsed, 4),
                )

    async def Tokenize(self, request: v1.TokenizeRequest, context: Context) -> v1.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        model, tokenizer = self._services.served_model(), self._services.tokenizer
        violations = [*check_model(request.model, model)]
        match request.WhichOneof("input"):
            case "text":
                violations += check_text(request.text, "text", may_be_empty=True)
            case "chat":
                violations += check_chat(request.chat, tokenizer.has_chat_template)
            case _:
                violations.append(FieldViolation("input", "missing; give one of `text` and `chat`"))
        if violations:
            raise InvalidRequestError(*violations)
        if request.HasField("chat"):
            ids = await self._encode_chat(request.chat)
        else:
            ids = await tokenizer.encode(request.text, add_special_tokens=not request.omit_special_tokens)
        return v1.TokenizeResponse(token_ids=ids, max_model_len=model.max_model_len)

    async def Detokenize(self, request: v1.DetokenizeRequest, context: Context) -> v1.DetokenizeResponse:
        """Turns token ids into text."""
        model = self._services.served_model()
        ids = list(request.token_ids)
        violations = [*check_model(request.model, model), *check_token_ids(ids, model.vocab_size, "token_ids")]
        if violations:
            raise InvalidRequestError(*violations)
        skip_special_tokens = not request.include_special_tokens
        text = await self._services.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return v1.DetokenizeResponse(text=text)

    async def _run(
        self,
        request: v1.GenerateRequest,
        valid: ValidRequest,
        model: link_pb2.ServedModel,
        arrival: float,
        span: Span,
        context: Context,
    ) -> None:
        services = self._services
        form = request.WhichOneof("input") or "input"
        prompt = await self._encode_prompt(request)
        max_tokens = fit(len(prompt), valid.max_tokens, services.config.default_max_tokens, model, form)
        describe_request(span, valid, chat=form == "chat", prompt_tokens=len(prompt), max_tokens=max_tokens)
        if not services.link.connected:
            raise NotReadyError("the scheduler is away; try again in a moment", retry_ms=RETRY_MS)
        left = context.time_remaining()
        wakeup = Wakeup()
        column = to_column(prompt)
        scheduling = wishes(request.scheduling, arrival=arrival, principal=ANONYMOUS)
        stream = Stream(
            StreamRequest(
                request_id=valid.request_id,
                prompt=column,
                max_tokens=max_tokens,
                stop_token_ids=to_column(valid.stop_token_ids),
                sampling=valid.sampling.SerializeToString(),
                stop_strings=valid.stop_strings,
                credit=services.config.stream_credit,
                arrival=arrival,
                deadline=None if left is None else time.monotonic() + left,
                traceparent=to_traceparent(span),
                scheduling=scheduling,
                block_keys=block_keys(model, scheduling.cache_scope, column),
                block_size=model.block_size,
            ),
            services.tokenizer.detokenizer(skip_special_tokens=not valid.include_special_tokens),
            wakeup.ring,
        )
        services.metrics.prompt_tokens.inc(len(prompt))
        try:
            # gRPC waits for ever for a client that does not read. While the stream lives that is the core's business:
            # it notices that no credit comes back. What is left at the end goes out in time or not at all.
            async with asyncio.timeout(None) as patience:
                stream.on_end = partial(self._limit, patience, stream)
                services.link.submit(stream)
                await self._pass_on(stream, wakeup, patience, context)
                await context.write(self._finished(stream, model.name, span))
        except TimeoutError:
            raise _failure(stream) or StalledReaderError("the client took no data for too long") from None
        finally:
            services.link.release(stream)
            services.metrics.generation_tokens.inc(stream.num_sent)
            services.metrics.merged_tokens.inc(stream.merged_tokens)

    def _limit(self, patience: asyncio.Timeout, stream: Stream) -> None:
        """Gives the reader of a stream that is over some time for its next message."""
        seconds = self._services.config.stall_timeout_s if _failure(stream) is None else FAREWELL_S
        if seconds > 0:
            patience.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _pass_on(self, stream: Stream, wakeup: Wakeup, patience: asyncio.Timeout, context: Context) -> None:
        """Writes what the stream yields until it is over, each message when the one before has really gone.

        Raises:
            QuireError: the stream ended with an error.
        """
        link, metrics = self._services.link, self._services.metrics
        last = 0.0
        while True:
            batch = stream.take()
            if batch is None:
                if stream.over:
                    break
                await wakeup.rung()
                continue
            response = v1.GenerateResponse()
            # Filling in place takes half the time of passing a Delta to the constructor.
            delta = response.delta
            delta.first_index = batch.first_index
            delta.token_ids.extend(batch.token_ids)
            delta.text = batch.text
            await context.write(response)
            if stream.over:
                self._limit(patience, stream)
            stream.taken()
            link.give_credit(stream)
            now = time.monotonic()
            if last:
                metrics.message_gap.observe(now - last)
            elif stream.first_token_at is not None:
                metrics.first_token.observe(stream.first_token_at - stream.request.arrival)
            last = now
        failure = _failure(stream)
        if failure is not None:
            raise failure

    def _finished(self, stream: Stream, model: str, span: Span) -> v1.GenerateResponse:
        """The last message of a stream that ended well."""
        end = stream.end
        assert end is not None, "a stream that is over without an error was ended by the core"
        reason = finish_reason(end)
        assert reason is not None, "a stream that the core ended with an error does not finish"
        finished = v1.Finished(reason=reason, request_id=stream.request.request_id, model=model)
        completion_tokens = end.completion_tokens
        if stream.stop_string is not None:
            # The core may have ended the stream for another reason before it heard of the match.
            finished.reason = v1.FINISH_REASON_STOP
            finished.stop_string = stream.stop_string
            completion_tokens = stream.keep_tokens
        elif end.reason == link_pb2.END_REASON_STOP:
            finished.stop_token_id = end.stop_token_id
        finished.usage.prompt_tokens = stream.request.num_prompt_tokens
        finished.usage.completion_tokens = completion_tokens
        finished.usage.cached_prompt_tokens = end.cached_prompt_tokens
        finished.usage.preemptions = end.preemptions
        arrival = stream.request.arrival
        finished.timings.queued.FromNanoseconds(end.queued_ns)
        if stream.first_token_at is not None:
            finished.timings.first_token.FromNanoseconds(int((stream.first_token_at - arrival) * 1e9))
        finished.timings.total.FromNanoseconds(int((time.monotonic() - arrival) * 1e9))
        describe_answer(
            span,
            finish_reason=v1.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
            output_tokens=completion_tokens,
            cached_tokens=end.cached_prompt_tokens,
            preemptions=end.preemptions,
        )
        return v1.GenerateResponse(finished=finished)

    async def _encode_prompt(self, request: v1.GenerateRequest) -> Sequence[int]:
        with self._services.tracer.start_as_current_span("tokenize", record_exception=False) as span:
            match request.WhichOneof("input"):
                case "text":
                    prompt: Sequence[int] = await self._services.tokenizer.encode(request.text)
                case "chat":
                    prompt = await self._encode_chat(request.chat)
                case _:
                    prompt = list(request.token_ids.ids)
            span.set_attribute("gen_ai.usage.input_tokens", len(prompt))
        return prompt

    async def _encode_chat(self, chat: v1.ChatInput) -> list[int]:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        try:
            return await self._services.tokenizer.encode_chat(
                messages, add_generation_prompt=not chat.omit_generation_prompt
            )
        except ChatTemplateError as error:
            raise InvalidRequestError(FieldViolation("chat", f"the model's chat template says: {error}")) from None

    def _claim(self, request_id: str) -> None:
        if (ANONYMOUS, request_id) in self._live:
            raise DuplicateRequestError("a live request has this request_id; choose another or wait for its end")
        self._live.add((ANONYMOUS, request_id))
        self.idle.clear()
        self._services.metrics.live_streams.set(len(self._live))

    def _release(self, request_id: str) -> None:
        self._live.discard((ANONYMOUS, request_id))
        self._services.metrics.live_streams.set(len(self._live))
        if not self._live:
            self.idle.set()


def _failure(stream: Stream) -> QuireError | None:
    """Why a stream ended without success; None while it lives, and when it ended well."""
    if stream.error is not None:
        return stream.error
    return None if stream.end is None or finish_reason(stream.end) is not None else error_of(stream.end)
