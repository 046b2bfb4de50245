"""Generation for one request, independent of the protocol: validate, tokenise, submit, deliver.

The protocol provides a `Caller` and `send`, which writes the messages (`services.calls.delivery`).

A request with n > 1 becomes n requests to the core with the same prompt. The requests share the prompt's blocks in the
prefix cache, and each uses its own random noise.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.access.shares import Turns
from services.calls.context import Caller, LiveRequests, Services, record_outcome
from services.calls.delivery import Choices, Delivery, Send, failure_of, without_output
from services.calls.resuming import (
    fetch_resume_replies,
    read_resume_info,
    request_identity,
    restore_stream,
    resume_info,
    skip_known,
)
from services.calls.tracing import describe_request, operation_name, request_span
from services.calls.wakeup import Wakeup
from services.requests.prompts import Prompts
from services.requests.scheduling import block_keys, due_times, schedule
from services.requests.tools import make_grammar, new_parser
from services.requests.validation import (
    MAX_CHOICES,
    ValidRequest,
    check_log_size,
    check_num_requests,
    check_num_tokens,
    resolve_max_tokens,
    scores_prompt,
    validate,
)
from services.streams.logprobs import token_logprobs
from services.streams.stream import Stream, StreamRequest
from shared.columns import to_column
from shared.errors import FieldViolation, InvalidRequestError
from shared.logging import get_logger
from shared.request_spec import RequestSpec
from shared.telemetry import to_traceparent

MAX_CHOICES_AT_ONCE = 8
"""Maximum number of choices for which a request is submitted without waiting for a turn."""


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A valid request with its caller and model."""

    request: v1.GenerateRequest
    valid: ValidRequest
    model: link_pb2.ServedModel
    caller: Caller
    span: Span
    shorten: bool
    """Whether `max_tokens` is reduced to what fits into the context."""

    @property
    def form(self) -> str:
        """Name of the field that holds the prompt."""
        return self.request.WhichOneof("input") or "input"


class Generator:
    """Runs the generation requests of one front-end process."""

    def __init__(self, services: Services, prompts: Prompts, live: LiveRequests, turns: Turns) -> None:
        """Create the generator. Requests with many choices use `turns`, because they block the event loop."""
        self._services = services
        self._turns = turns
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
        prompt_encoded: Callable[[Sequence[int]], None] | None = None,
        shorten: bool = False,
    ) -> None:
        """Run a request and send its messages: deltas and other events, then one `Finished`.

        Args:
            request: the request, into which the model's sampling defaults are filled.
            caller: its caller.
            send: writes a message.
            begun: called with the id of the request before the first message.
            prompt_encoded: called once with the prompt's token ids, before the first message.
            shorten: reduce `max_tokens` to the context that remains after the prompt, instead of raising an error.

        Raises:
            QuireError: the request is invalid or failed; messages sent before remain valid.
        """
        with request_span(self._services.tracer, caller.traceparent, caller.operation, self._services.tail) as span:
            model = self._services.served_model()
            self._services.defaults.fill(request)
            if shorten:
                request.stop.max_tokens = min(request.stop.max_tokens, model.max_model_len - 1)
            valid = validate(
                request,
                model,
                self._services.model_format,
                has_chat_template=self._services.tokenizer.has_chat_template,
            )
            check_num_requests(valid.num_choices, self._services.link.max_call_requests)
            with (
                self._live.track(caller.principal, valid.request_id),
                record_outcome(
                    self._services.metrics,
                    caller,
                    valid.request_id,
                    span,
                    operation=operation_name(request),
                    model=model.name,
                ),
            ):
                if begun is not None:
                    await begun(valid.request_id)
                if valid.only_prompt:
                    send = without_output(send)
                await self._run(_Accepted(request, valid, model, caller, span, shorten), send, prompt_encoded)

    async def _run(
        self, accepted: _Accepted, send: Send, prompt_encoded: Callable[[Sequence[int]], None] | None
    ) -> None:
        services, valid, model = self._services, accepted.valid, accepted.model
        began = time.monotonic()
        prompt = await self._prompts.encode(accepted.request, model, accepted.form)
        tokenise_s = time.monotonic() - began
        if valid.truncate_prompt_tokens is not None:
            prompt = prompt[-min(valid.truncate_prompt_tokens, model.max_model_len - (valid.max_tokens or 1)) :]
        check_num_tokens(valid.num_choices, len(prompt), services.link.max_call_tokens)
        if prompt_encoded is not None:
            prompt_encoded(prompt)
        wakeup = Wakeup()
        reasons = services.begins_in_reasoning(prompt)
        first = await self._first_choice(accepted, prompt, tokenise_s, reasons=reasons)
        if valid.num_choices > MAX_CHOICES_AT_ONCE:
            await self._turns.begin_work(accepted.caller.principal)
        streams = [
            Stream(
                first if choice == 0 else _for_choice(first, choice, valid, accepted.caller),
                services.tokenizer.detokenizer(
                    skip_special_tokens=valid.output.skip_special_tokens, shown=valid.output.shown_tokens
                ),
                wakeup.ring,
                new_parser(accepted.request, valid.tools, services.model_format, reasons=reasons),
            )
            for choice in range(valid.num_choices)
        ]
        services.metrics.prompt_submitted(model.name, first.spec.tenant, len(prompt))
        get_logger().debug(
            "request submitted",
            request_id=valid.request_id,
            prompt_tokens=len(prompt),
            max_tokens=first.spec.max_tokens,
            choices=valid.num_choices,
        )

        async def begin() -> None:
            for stream in streams:
                services.link.submit(stream)
            if valid.echo or valid.prompt_logprobs:
                await self._send_prompt(valid, prompt, streams[0], wakeup, send)

        choices = Choices(streams, model.name, valid.request_id, operation_name(accepted.request))
        await self._delivery.serve(choices, wakeup, accepted.span, send, begin, keep=valid.resumable)

    async def _first_choice(
        self, accepted: _Accepted, prompt: Sequence[int], tokenise_s: float, *, reasons: bool
    ) -> StreamRequest:
        """Return the request to the core for the first choice. The requests for other choices differ in few fields.

        Raises:
            QuireError: the prompt does not fit, the grammar is not usable, or the core is not connected.
        """
        services, request, valid, model = self._services, accepted.request, accepted.valid, accepted.model
        caller, span, form = accepted.caller, accepted.span, accepted.form
        requested = valid.max_tokens
        if accepted.shorten and requested is not None:
            requested = min(requested, max(model.max_model_len - len(prompt), 1))
        default = services.defaults.default_max_tokens(services.config.default_max_tokens)
        max_tokens = resolve_max_tokens(len(prompt), requested, default, model, form)
        describe_request(
            span, valid, operation=operation_name(request), prompt_tokens=len(prompt), max_tokens=max_tokens
        )
        services.check_connected()
        column = to_column(prompt)
        await self._prompts.add_bad_words(valid, model)
        spec = RequestSpec(
            request_id=valid.request_id,
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            stop_token_ids=to_column(valid.stop_token_ids),
            sampling=valid.sampling.SerializeToString(),
            computes_whole_prompt=valid.prompt_logprobs,
            model=model.fingerprint,
            identity=request_identity(caller.principal, valid.request_id, 0) if valid.resumable else b"",
            resume_info=resume_info(request) if valid.resumable else b"",
            traceparent=to_traceparent(span),
        )
        spec = schedule(spec, request.scheduling, CURRENT.get())
        began = time.monotonic()
        if request.HasField("grammar"):
            spec = spec._replace(grammar=await services.grammars.check(request.grammar, model))
        elif (of_calls := make_grammar(valid.tools, services.model_format, reasons=reasons)) is not None:
            spec = spec._replace(grammar=await services.grammars.check(of_calls, model, "chat.tools_json"))
        grammar_s = time.monotonic() - began
        check_log_size(valid, spec)
        return StreamRequest(
            spec=spec,
            prompt=column,
            output=valid.output,
            credit=services.config.stream_credit,
            arrival=caller.arrival,
            due=due_times(request.scheduling, arrival=caller.arrival, deadline=caller.deadline),
            block_keys=block_keys(model, spec.cache_scope, column),
            block_size=model.block_size,
            tokenise_s=tokenise_s,
            grammar_s=grammar_s,
        )

    async def resume(
        self, request: v1.ResumeRequest, caller: Caller, send: Send, *, begun: Callable[[str], Awaitable[object]]
    ) -> None:
        """Resume a request after its client lost the connection; otherwise like `run`.

        Raises:
            QuireError: the core has no log of the request, or the request failed.
        """
        services = self._services
        if not request.request_id:
            raise InvalidRequestError(FieldViolation("request_id", "missing; add the id of the request"))
        with request_span(services.tracer, caller.traceparent, caller.operation, services.tail) as span:
            model = services.served_model()
            wakeup = Wakeup()
            kept = await fetch_resume_replies(services.link, caller.principal, request.request_id)
            info = read_resume_info(kept[0])
            streams = [
                restore_stream(
                    reply,
                    choice,
                    services,
                    model,
                    credit=services.config.stream_credit,
                    arrival=caller.arrival,
                    traceparent=to_traceparent(span),
                    wake=wakeup.ring,
                )
                for choice, reply in enumerate(kept)
            ]
            tokens, text, parts = (
                list(request.from_tokens),
                list(request.from_text_bytes),
                list(request.from_part_bytes),
            )
            for choice, stream in enumerate(streams):
                skip_known(
                    stream,
                    services.tokenizer,
                    tokens[choice] if choice < len(tokens) else 0,
                    text[choice] if choice < len(text) else None,
                    parts[choice] if choice < len(parts) else None,
                )
            if scores_prompt(info):
                send = without_output(send)
            with self._live.track(caller.principal, request.request_id, again=True):
                await begun(request.request_id)

                async def begin() -> None:
                    for stream in streams:
                        if not stream.over:
                            services.link.submit(stream)

                choices = Choices(streams, model.name, request.request_id, operation_name(info))
                await self._delivery.serve(choices, wakeup, span, send, begin, keep=True)

    async def cancel(self, request_id: str, principal: str) -> None:
        """Cancel a resumable request and drop its log.

        Raises:
            RequestNotFoundError: no request has this id.
            NotReadyError: the core did not respond in time.
        """
        if not request_id:
            raise InvalidRequestError(FieldViolation("request_id", "missing; add the id of the request"))
        identities = [request_identity(principal, request_id, choice) for choice in range(MAX_CHOICES)]
        order = link_pb2.OperatorRequest(cancel_requests=link_pb2.CancelRequests(identities=identities))
        await self._services.link.operate(order)

    async def _send_prompt(
        self, valid: ValidRequest, prompt: Sequence[int], stream: Stream, wakeup: Wakeup, send: Send
    ) -> None:
        """Send the prompt, with its log-probabilities once the model has processed all of it."""
        tokenizer = self._services.tokenizer
        message = v1.Prompt(token_ids=prompt)
        if valid.echo:
            message.text = await tokenizer.decode(prompt, skip_special_tokens=valid.output.skip_special_tokens)
        if valid.prompt_logprobs:
            while not (stream.num_generated or stream.over):
                await wakeup.rung()
            failure = failure_of([stream])
            if failure is not None and not stream.num_generated:
                raise failure

            def score() -> Iterator[None]:
                for index, token_id in enumerate(prompt):
                    scores = stream.prompt_scores.get(index)
                    message.logprobs.append(
                        v1.TokenLogprobs() if scores is None else token_logprobs(token_id, scores, tokenizer)
                    )
                    yield

            await self._services.slices.run(CURRENT.get().name, score())
        await send(v1.GenerateResponse(prompt=message))


def _for_choice(first: StreamRequest, choice: int, valid: ValidRequest, caller: Caller) -> StreamRequest:
    identity = request_identity(caller.principal, valid.request_id, choice) if valid.resumable else b""
    return first.for_choice(choice, _of_choice(valid.sampling, choice), identity)


def _of_choice(sampling: plan_pb2.SamplingParams, choice: int) -> bytes:
    """Return the sampling parameters of a further choice, without prompt log-probabilities.

    The choice index selects its own random noise.
    """
    own = plan_pb2.SamplingParams()
    own.CopyFrom(sampling)
    own.choice = choice
    own.ClearField("prompt_logprobs")
    return own.SerializeToString()
