"""One generation from request to last message, whatever protocol asked for it: validate, tokenise, submit, deliver.

The protocol's side is two values: a `Caller`, which says who asks and until when, and `send`, which takes the messages
(`services.delivery`).

A request with n > 1 is n requests to the core with one prompt: they share its blocks in the prefix cache, and each
draws noise of its own.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.context import Caller, LiveRequests, Services, outcome_told
from services.delivery import Choices, Delivery, Send, failure_of
from services.errors import RETRY_MS
from services.logprobs import token_logprobs
from services.principals import CURRENT
from services.prompts import Prompts
from services.resuming import identity_of, info_of, kept_of, resume_info, skip_known, stream_of
from services.scheduling import block_keys, wishes
from services.stream import Stream, StreamRequest
from services.tracing import describe_request, request_span
from services.validation import MAX_CHOICES, ValidRequest, fit, validate
from services.wakeup import Wakeup
from shared.columns import to_column
from shared.errors import FieldViolation, InvalidRequestError, NotReadyError, RequestNotFoundError
from shared.logging import get_logger
from shared.telemetry import to_traceparent

_CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request that was found valid, and whose it is."""

    request: v1.GenerateRequest
    valid: ValidRequest
    model: link_pb2.ServedModel
    caller: Caller
    span: Span

    @property
    def form(self) -> str:
        """The field that the prompt is in."""
        return self.request.WhichOneof("input") or "input"


class Generator:
    """Runs the generations of one front-end process."""

    def __init__(self, services: Services, prompts: Prompts, live: LiveRequests) -> None:
        self._services = services
        self._prompts = prompts
        self._live = live
        self._delivery = Delivery(services)

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
        with request_span(self._services.tracer, caller.traceparent, caller.operation) as span:
            model = self._services.served_model()
            valid = validate(request, model, has_chat_template=self._services.tokenizer.has_chat_template)
            with (
                self._live.one_more(caller.principal, valid.request_id),
                outcome_told(self._services.metrics, caller, valid.request_id),
            ):
                if begun is not None:
                    await begun(valid.request_id)
                await self._run(_Accepted(request, valid, model, caller, span), send)

    async def _run(self, accepted: _Accepted, send: Send) -> None:
        services, valid, model = self._services, accepted.valid, accepted.model
        prompt = await self._prompts.encode(accepted.request, model, accepted.form)
        if valid.truncate_prompt_tokens is not None:
            prompt = prompt[-valid.truncate_prompt_tokens :]
        wakeup = Wakeup()
        first = await self._first_choice(accepted, prompt)
        streams = [
            Stream(
                first if choice == 0 else _for_choice(first, choice, valid, accepted.caller),
                services.tokenizer.detokenizer(skip_special_tokens=not valid.include_special_tokens),
                wakeup.ring,
            )
            for choice in range(valid.num_choices)
        ]
        services.metrics.prompt_tokens.inc(len(prompt))
        get_logger().debug(
            "request submitted",
            request_id=valid.request_id,
            prompt_tokens=len(prompt),
            max_tokens=first.max_tokens,
            choices=valid.num_choices,
        )

        async def begin() -> None:
            for stream in streams:
                services.link.submit(stream)
            if valid.echo or valid.prompt_logprobs:
                await self._tell_prompt(valid, prompt, streams[0], wakeup, send)

        choices = Choices(streams, model.name, valid.request_id)
        await self._delivery.serve(choices, wakeup, accepted.span, send, begin, keep=valid.resumable)

    async def _first_choice(self, accepted: _Accepted, prompt: Sequence[int]) -> StreamRequest:
        """What the core is told of the request's first choice; the others differ little.

        Raises:
            QuireError: the prompt does not fit, the grammar cannot be used, or the core is away.
        """
        services, request, valid, model = self._services, accepted.request, accepted.valid, accepted.model
        caller, span, form = accepted.caller, accepted.span, accepted.form
        max_tokens = fit(len(prompt), valid.max_tokens, services.config.default_max_tokens, model, form)
        describe_request(span, valid, chat=form == "chat", prompt_tokens=len(prompt), max_tokens=max_tokens)
        services.check_connected()
        column = to_column(prompt)
        await self._prompts.add_bad_words(valid, model)
        scheduling = wishes(request.scheduling, arrival=caller.arrival, principal=CURRENT.get())
        return StreamRequest(
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
        with request_span(services.tracer, caller.traceparent, caller.operation) as span:
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
            with self._live.one_more(caller.principal, request.request_id, again=True):
                await begun(request.request_id)

                async def begin() -> None:
                    for stream in streams:
                        if not stream.over:
                            services.link.submit(stream, again=True)

                choices = Choices(streams, model.name, request.request_id)
                await self._delivery.serve(choices, wakeup, span, send, begin, keep=True)

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
            failure = failure_of([stream])
            if failure is not None and not stream.num_generated:
                raise failure
            for index, token_id in enumerate(prompt):
                scores = stream.prompt_scores.get(index)
                message.logprobs.append(
                    v1.TokenLogprobs() if scores is None else token_logprobs(token_id, scores, tokenizer)
                )
        await send(v1.GenerateResponse(prompt=message))


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
