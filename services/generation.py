"""One generation from request to last message, whatever protocol asked for it: validate, tokenise, submit, pass on.

The protocol's side is two values: a `Caller`, which says who asks and until when, and `send`, which takes one message
after the other and returns when it has really gone. So a lagging reader is noticed here the same way for all of them.

A request with n > 1 is n requests to the core with one prompt: they share its blocks in the prefix cache, and each
draws noise of its own. They end together: when one fails or the caller goes, all are over.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import Span, Tracer

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.chat import template_input
from services.chat_template import ChatTemplateError
from services.core_link import CoreLink
from services.errors import RETRY_MS, error_of, finish_reason
from services.grammars import GrammarChecker
from services.logprobs import token_logprobs
from services.metrics import FrontendMetrics
from services.principals import CURRENT
from services.resuming import (
    MAX_CHOICES,
    identity_of,
    info_of,
    kept_of,
    resume_info,
    skip_known,
    stream_of,
)
from services.scheduling import block_keys, wishes
from services.stream import Stream, StreamRequest
from services.tokenizer import TextTokenizer
from services.tracing import describe_answer, describe_request, server_span
from services.validation import ValidRequest, fit, validate
from services.wakeup import Wakeup
from shared.columns import from_column, to_column
from shared.config import FrontendConfig
from shared.errors import (
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    QuireError,
    RequestNotFoundError,
    StalledReaderError,
)
from shared.logging import get_logger
from shared.telemetry import to_traceparent

FAREWELL_S = 1.0
"""How long the reader of a stream that ended with an error has for what came before the error."""
_CANCEL_TIMEOUT_S = 5.0
Send = Callable[[v1.GenerateResponse], Awaitable[object]]
"""Takes a message; done when it has really gone to the reader, so that a slow one is waited for."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the servicers work with."""

    config: FrontendConfig
    link: CoreLink
    tokenizer: TextTokenizer
    grammars: GrammarChecker
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and until when."""

    method: str = "Generate"
    """The call's name, for its span."""
    principal: str = field(default_factory=lambda: CURRENT.get().name)
    traceparent: str = ""
    """W3C traceparent of the caller's span; may be empty."""
    arrival: float = field(default_factory=time.monotonic)
    """Monotonic time, seconds."""
    deadline: float | None = None
    """Monotonic time, seconds."""


class Generator:
    """Runs the generations of one front-end process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live: Counter[tuple[str, str]] = Counter()
        """(principal, request id) of the calls in progress."""
        self.idle = asyncio.Event()
        """Set while no request is in progress."""
        self.idle.set()

    async def run(
        self,
        request: v1.GenerateRequest,
        caller: Caller,
        send: Send,
        *,
        begun: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """Answers a request through `send`: deltas and other events, then one `Finished`.

        Args:
            request: what is wanted.
            caller: who wants it.
            send: takes the messages.
            begun: told the request's id before the first message.

        Raises:
            QuireError: the request failed, or can never succeed; what was sent before stands.
        """
        with server_span(self._services.tracer, caller.traceparent, caller.method) as span:
            model = self._services.served_model()
            valid = validate(request, model, has_chat_template=self._services.tokenizer.has_chat_template)
            self._claim(caller.principal, valid.request_id)
            outcome = ""
            try:
                if begun is not None:
                    await begun(valid.request_id)
                await self._run(request, valid, model, caller, span, send)
                outcome = "OK"
            except QuireError as error:
                outcome = error.code
                raise
            except Exception:
                outcome = "INTERNAL"
                raise
            finally:
                self._release(caller.principal, valid.request_id)
                elapsed = time.monotonic() - caller.arrival
                self._services.metrics.duration.observe(elapsed)
                get_logger().info(
                    "request ended",
                    request_id=valid.request_id,
                    outcome=outcome or _cancel_code(caller),
                    seconds=round(elapsed, 4),
                )

    async def encode_chat(self, chat: v1.ChatInput, field_name: str = "chat") -> list[int]:
        """The token ids of a valid conversation.

        Raises:
            InvalidRequestError: the template refuses it.
        """
        try:
            return await self._services.tokenizer.encode_chat(template_input(chat))
        except ChatTemplateError as error:
            raise InvalidRequestError(FieldViolation(field_name, f"the model's chat template says: {error}")) from None

    async def _run(
        self,
        request: v1.GenerateRequest,
        valid: ValidRequest,
        model: link_pb2.ServedModel,
        caller: Caller,
        span: Span,
        send: Send,
    ) -> None:
        services = self._services
        form = request.WhichOneof("input") or "input"
        prompt = await self._encode_prompt(request)
        if valid.truncate_prompt_tokens is not None:
            prompt = prompt[-valid.truncate_prompt_tokens :]
        max_tokens = fit(len(prompt), valid.max_tokens, services.config.default_max_tokens, model, form)
        describe_request(span, valid, chat=form == "chat", prompt_tokens=len(prompt), max_tokens=max_tokens)
        if not services.link.connected:
            raise NotReadyError("the scheduler is away; try again in a moment", retry_ms=RETRY_MS)
        column = to_column(prompt)
        wakeup = Wakeup()
        await self._add_bad_words(valid, model)
        scheduling = wishes(request.scheduling, arrival=caller.arrival, principal=CURRENT.get())
        first = StreamRequest(
            request_id=valid.request_id,
            prompt=column,
            max_tokens=max_tokens,
            stop_token_ids=to_column(valid.stop_token_ids),
            sampling=valid.sampling.SerializeToString(),
            identity=identity_of(caller.principal, valid.request_id, 0) if valid.resumable else b"",
            resume_info=resume_info(request) if valid.resumable else b"",
            grammar=await services.grammars.check(request.grammar, model) if request.HasField("grammar") else b"",
            wants_scores=valid.logprobs,
            wants_prompt_scores=valid.prompt_logprobs,
            stop_strings=valid.stop_strings,
            include_stop_string=valid.include_stop_string,
            min_tokens=valid.min_tokens,
            credit=services.config.stream_credit,
            arrival=caller.arrival,
            deadline=caller.deadline,
            traceparent=to_traceparent(span),
            scheduling=scheduling,
            block_keys=block_keys(model, scheduling.cache_scope, column),
            block_size=model.block_size,
        )
        streams = [
            Stream(
                first if choice == 0 else _for_choice(first, choice, valid, caller),
                services.tokenizer.detokenizer(skip_special_tokens=not valid.include_special_tokens),
                wakeup.ring,
            )
            for choice in range(valid.num_choices)
        ]
        services.metrics.prompt_tokens.inc(len(prompt))

        async def begin() -> None:
            for stream in streams:
                services.link.submit(stream)
            if valid.echo or valid.prompt_logprobs:
                await self._tell_prompt(valid, prompt, streams[0], wakeup, send)

        answer = _Answer(streams, model.name, valid.request_id)
        await self._serve(answer, wakeup, span, send, begin, keep=valid.resumable)

    async def resume(
        self, request: v1.ResumeRequest, caller: Caller, send: Send, *, begun: Callable[[str], Awaitable[object]]
    ) -> None:
        """Goes on with a request where its client lost it; as `run` otherwise.

        Raises:
            QuireError: nothing is kept of the request, or it failed.
        """
        services = self._services
        if not request.request_id:
            raise InvalidRequestError(FieldViolation("request_id", "missing"))
        with server_span(services.tracer, caller.traceparent, caller.method) as span:
            model = services.served_model()
            wakeup = Wakeup()
            kept = await kept_of(services.link, caller.principal, request.request_id)
            info = info_of(kept[0])
            streams = [
                stream_of(
                    reply,
                    choice,
                    services.tokenizer,
                    model,
                    credit=services.config.stream_credit,
                    arrival=caller.arrival,
                    traceparent=to_traceparent(span),
                    wake=wakeup.ring,
                )
                for choice, reply in enumerate(kept)
            ]
            tokens, text = list(request.from_tokens), list(request.from_text_bytes)
            for choice, stream in enumerate(streams):
                skip_known(
                    stream,
                    info,
                    services.tokenizer,
                    tokens[choice] if choice < len(tokens) else 0,
                    text[choice] if choice < len(text) else None,
                )
            self._live[caller.principal, request.request_id] += 1
            self._count_live()
            try:
                await begun(request.request_id)

                async def begin() -> None:
                    for stream in streams:
                        if not stream.over:
                            services.link.submit(stream, again=True)

                answer = _Answer(streams, model.name, request.request_id)
                await self._serve(answer, wakeup, span, send, begin, keep=True)
            finally:
                self._release(caller.principal, request.request_id)

    async def cancel(self, request_id: str, principal: str) -> None:
        """Ends a resumable request, and forgets what is kept of it.

        Raises:
            RequestNotFoundError: there is none with this id.
            NotReadyError: the core does not answer.
        """
        if not request_id:
            raise InvalidRequestError(FieldViolation("request_id", "missing"))
        identities = [identity_of(principal, request_id, choice) for choice in range(MAX_CHOICES)]
        order = link_pb2.OperatorRequest(cancel_requests=link_pb2.CancelRequests(identities=identities))
        reply = await self._services.link.operate(order, _CANCEL_TIMEOUT_S)
        if reply is None:
            raise NotReadyError("the scheduler is away; try again in a moment", retry_ms=RETRY_MS)
        if reply.not_found:
            raise RequestNotFoundError("no resumable request with this id is live or kept")

    async def _serve(
        self,
        answer: "_Answer",
        wakeup: Wakeup,
        span: Span,
        send: Send,
        begin: Callable[[], Awaitable[None]],
        *,
        keep: bool,
    ) -> None:
        """Passes on what the streams yield once `begin` has submitted them; `keep`: the client may come back."""
        services, streams = self._services, answer.streams
        is_gone = True
        try:
            # gRPC waits for ever for a client that does not read. While a stream lives that is the core's business: it
            # notices that no credit comes back. What is left at the end goes out in time or not at all.
            async with asyncio.timeout(None) as patience:
                for stream in streams:
                    stream.on_end = partial(self._limit, patience, streams)
                await begin()
                await self._pass_on(answer, wakeup, patience, send)
                await send(answer.finished(span))
        except TimeoutError:
            raise _failure(streams) or StalledReaderError("the client took no data for too long") from None
        except QuireError:
            is_gone = False
            raise
        finally:
            for stream in streams:
                services.link.release(stream, keep=keep and is_gone)
                services.metrics.generation_tokens.inc(stream.num_sent)
                services.metrics.merged_tokens.inc(stream.merged_tokens)

    async def _tell_prompt(
        self, valid: ValidRequest, prompt: Sequence[int], stream: Stream, wakeup: Wakeup, send: Send
    ) -> None:
        """Sends the prompt, with what its tokens' log-probabilities are once the model has seen all of it."""
        tokenizer = self._services.tokenizer
        message = v1.Prompt(token_ids=prompt)
        if valid.echo:
            message.text = await tokenizer.decode(prompt, skip_special_tokens=not valid.include_special_tokens)
        if valid.prompt_logprobs:
            while not (stream.num_generated or stream.over):
                await wakeup.rung()
            failure = _failure([stream])
            if failure is not None and not stream.num_generated:
                raise failure
            for index, token_id in enumerate(prompt):
                scores = stream.prompt_scores.get(index)
                message.logprobs.append(
                    v1.TokenLogprobs() if scores is None else token_logprobs(token_id, scores, tokenizer)
                )
        await send(v1.GenerateResponse(prompt=message))

    async def _add_bad_words(self, valid: ValidRequest, model: link_pb2.ServedModel) -> None:
        """Forbids what the request's bad words are as tokens, with and without a space before."""
        if not valid.bad_words:
            return
        banned = set(from_column(valid.sampling.banned_token_ids).tolist())
        longer = set()
        for word in valid.bad_words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(await self._services.tokenizer.encode(text, add_special_tokens=False))
                if len(ids) == 1:
                    banned.add(ids[0])
                elif ids:
                    longer.add(ids)
        allowed = set(from_column(valid.sampling.allowed_token_ids).tolist())
        if allowed <= banned if allowed else len(banned) >= model.vocab_size:
            raise InvalidRequestError(FieldViolation("sampling.bad_words", "leave no token to choose"))
        valid.sampling.banned_token_ids = to_column(sorted(banned))
        valid.sampling.bad_words.extend(to_column(ids) for ids in sorted(longer))

    def _limit(self, patience: asyncio.Timeout, streams: list[Stream]) -> None:
        """Gives the reader of a request that is over some time for its next message."""
        failure = _failure(streams)
        if failure is None and not all(stream.over for stream in streams):
            return
        seconds = self._services.config.stall_timeout_s if failure is None else FAREWELL_S
        if seconds > 0:
            patience.reschedule(asyncio.get_running_loop().time() + seconds)

    async def _pass_on(self, answer: "_Answer", wakeup: Wakeup, patience: asyncio.Timeout, send: Send) -> None:
        """Writes what the streams yield until all are over, each message when the one before has really gone.

        Raises:
            QuireError: a stream ended with an error.
        """
        link, metrics = self._services.link, self._services.metrics
        streams = answer.streams
        live = list(streams)
        last = [0.0] * len(streams)
        while live:
            idle = True
            for stream in live:
                batch = stream.take()
                if batch is None:
                    continue
                idle = False
                response = v1.GenerateResponse()
                # Filling in place takes half the time of passing a Delta to the constructor.
                delta = response.delta
                choice = stream.request.choice
                delta.choice = choice
                delta.first_index = batch.first_index
                delta.token_ids.extend(batch.token_ids)
                delta.text = batch.text
                if stream.request.wants_scores:
                    tokenizer = self._services.tokenizer
                    for index, token_id in enumerate(batch.token_ids, batch.first_index):
                        delta.logprobs.append(token_logprobs(token_id, stream.scores.pop(index, None), tokenizer))
                await send(response)
                if stream.over:
                    self._limit(patience, streams)
                stream.taken()
                link.give_credit(stream)
                now = time.monotonic()
                if last[choice]:
                    metrics.message_gap.observe(now - last[choice])
                elif stream.first_token_at is not None:
                    metrics.first_token.observe(stream.first_token_at - stream.request.arrival)
                last[choice] = now
            if not idle:
                continue
            ended = [stream for stream in live if stream.over]
            if not ended:
                await wakeup.rung()
                continue
            failure = _failure(ended)
            if failure is not None:
                raise failure
            for stream in ended:
                live.remove(stream)
                if len(streams) > 1:
                    await send(v1.GenerateResponse(choice_finished=answer.choice_finished(stream)))

    async def _encode_prompt(self, request: v1.GenerateRequest) -> Sequence[int]:
        with self._services.tracer.start_as_current_span("tokenize", record_exception=False) as span:
            match request.WhichOneof("input"):
                case "text":
                    prompt: Sequence[int] = await self._services.tokenizer.encode(request.text)
                case "chat":
                    prompt = await self.encode_chat(request.chat)
                case _:
                    prompt = list(request.token_ids.ids)
            span.set_attribute("gen_ai.usage.input_tokens", len(prompt))
        return prompt

    def _claim(self, principal: str, request_id: str) -> None:
        if (principal, request_id) in self._live:
            raise DuplicateRequestError("a live request has this request_id; choose another or wait for its end")
        self._live[principal, request_id] += 1
        self._count_live()

    def _release(self, principal: str, request_id: str) -> None:
        self._live[principal, request_id] -= 1
        if not self._live[principal, request_id]:
            del self._live[principal, request_id]
        self._count_live()

    def _count_live(self) -> None:
        self._services.metrics.live_streams.set(self._live.total())
        if self._live:
            self.idle.clear()
        else:
            self.idle.set()


@dataclass(frozen=True, slots=True)
class _Answer:
    """The streams of one request, and how their ends are told."""

    streams: list[Stream]
    """By choice."""
    model: str
    request_id: str

    def choice_finished(self, stream: Stream) -> v1.ChoiceFinished:
        """How a stream ended well."""
        end = stream.end
        assert end is not None, "a stream that is over without an error was ended by the core"
        reason = finish_reason(end)
        assert reason is not None, "a stream that the core ended with an error does not finish"
        finished = v1.ChoiceFinished(
            choice=stream.request.choice, reason=reason, completion_tokens=end.completion_tokens
        )
        if stream.stop_string is not None:
            # The core may have ended the stream for another reason before it heard of the match.
            finished.reason = v1.FINISH_REASON_STOP
            finished.stop_string = stream.stop_string
            finished.completion_tokens = stream.keep_tokens
        elif end.reason == link_pb2.END_REASON_STOP:
            finished.stop_token_id = end.stop_token_id
        return finished

    def finished(self, span: Span) -> v1.GenerateResponse:
        """The last message of a request that ended well."""
        response = v1.GenerateResponse()
        finished = response.finished
        finished.request_id, finished.model = self.request_id, self.model
        choices = [self.choice_finished(stream) for stream in self.streams]
        first = choices[0]
        finished.reason = first.reason
        match first.WhichOneof("stop"):
            case "stop_string":
                finished.stop_string = first.stop_string
            case "stop_token_id":
                finished.stop_token_id = first.stop_token_id
        ends = [stream.end for stream in self.streams if stream.end is not None]
        request = self.streams[0].request
        usage = finished.usage
        usage.prompt_tokens = request.num_prompt_tokens
        usage.completion_tokens = sum(choice.completion_tokens for choice in choices)
        usage.cached_prompt_tokens = ends[0].cached_prompt_tokens
        usage.preemptions = sum(end.preemptions for end in ends)
        finished.timings.queued.FromNanoseconds(ends[0].queued_ns)
        firsts = [stream.first_token_at for stream in self.streams if stream.first_token_at is not None]
        if firsts:
            finished.timings.first_token.FromNanoseconds(int((min(firsts) - request.arrival) * 1e9))
        finished.timings.total.FromNanoseconds(int((time.monotonic() - request.arrival) * 1e9))
        describe_answer(
            span,
            finish_reasons=[v1.FinishReason.Name(c.reason).removeprefix("FINISH_REASON_").lower() for c in choices],
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            preemptions=usage.preemptions,
        )
        return response


def _for_choice(first: StreamRequest, choice: int, valid: ValidRequest, caller: Caller) -> StreamRequest:
    identity = identity_of(caller.principal, valid.request_id, choice) if valid.resumable else b""
    return first.for_choice(choice, _of_choice(valid.sampling, choice), identity)


def _of_choice(sampling: plan_pb2.SamplingParams, choice: int) -> bytes:
    """The parameters of a further choice: noise of its own, and the prompt is the first one's business."""
    own = plan_pb2.SamplingParams()
    own.CopyFrom(sampling)
    own.choice = choice
    own.ClearField("prompt_logprobs")
    return own.SerializeToString()


def _failure(streams: Sequence[Stream]) -> QuireError | None:
    """Why one of the streams ended without success; None when none did."""
    for stream in streams:
        if stream.error is not None:
            return stream.error
        if stream.end is not None and finish_reason(stream.end) is None:
            return error_of(stream.end)
    return None


def _cancel_code(caller: Caller) -> str:
    """Why a request that ended without an answer or an error did so: its deadline passed, or the caller went away."""
    passed = caller.deadline is not None and caller.deadline <= time.monotonic()
    return "DEADLINE_EXCEEDED" if passed else "CANCELLED"
