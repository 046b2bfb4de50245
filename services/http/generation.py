"""`/v1/completions` and `/v1/chat/completions`: runs requests with the generator and writes its answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quire.v1 import generation_pb2 as v1
from services.calls.context import Caller, Services
from services.calls.delivery import Send
from services.calls.generation import Generator
from services.calls.together import run_together
from services.calls.tracing import part_of, request_span
from services.http.answers import Answer
from services.http.bodies import parse
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model, choose_request_id
from services.http.logprobs import Logprobs
from services.http.prompts import Prepared, prepare_chat, prepare_completion, prompts_of
from services.http.schema import ChatBody, CompletionBody, SamplingBody, StreamOptions
from services.http.whole_answer import WholeAnswer
from shared import span_names
from shared.errors import FieldViolation, InvalidRequestError, QuireError

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of completions that do not set it, as in OpenAI's API and vLLM: a bare prompt may have no end."""

MAX_REPEATED_LOGPROBS = 1024
"""Maximum number of log-probabilities for each prompt token, over all prompts and choices of a request."""


class GenerationEndpoints:
    """Endpoints of completions and chat completions."""

    def __init__(self, services: Services, generator: Generator) -> None:
        self._services = services
        self._generator = generator

    async def complete(self, exchange: Exchange) -> None:
        """Serve `/v1/completions`."""
        body = await exchange.read(partial(parse, CompletionBody))
        uses_default = body.max_tokens is None and not self._services.config.default_max_tokens
        if uses_default:
            body = body.model_copy(update={"max_tokens": DEFAULT_COMPLETION_TOKENS})
        request_id = choose_request_id(exchange, body)
        prompts = prompts_of(body.prompt)
        ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{number}" for number in range(len(prompts))]
        prepared = [prepare_completion(body, prompt, each) for prompt, each in zip(prompts, ids, strict=True)]
        answer = self._answer(body, f"cmpl-{request_id}", prepared, top_logprobs=body.logprobs, echo=body.echo)
        await exchange.run_until_disconnect(self._run(exchange, body, answer, prepared, shorten=uses_default))

    async def chat(self, exchange: Exchange) -> None:
        """Serve `/v1/chat/completions`."""
        body = await exchange.read(partial(parse, ChatBody))
        request_id = choose_request_id(exchange, body)
        prepared = prepare_chat(body, request_id, strict_order=self._services.tokenizer.has_strict_template)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        answer = self._answer(body, f"chatcmpl-{request_id}", [prepared], top_logprobs=top_logprobs, chat=True)
        await exchange.run_until_disconnect(self._run(exchange, body, answer, [prepared]))

    def _answer(
        self,
        body: SamplingBody,
        answer_id: str,
        prepared: Sequence[Prepared],
        *,
        top_logprobs: int | None,
        echo: bool = False,
        chat: bool = False,
    ) -> Answer:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError(FieldViolation("stream_options", "requires stream; set stream to true"))
        choose_model(self._services, body.model)
        _check_size(body, len(prepared), top_logprobs if echo else None)
        logprobs = None
        if top_logprobs is not None:
            tokenizer = self._services.tokenizer
            detokenizer = partial(tokenizer.detokenizer, skip_special_tokens=body.skip_special_tokens)
            logprobs = Logprobs(top_logprobs, body.return_tokens_as_token_ids, tokenizer.token_bytes, detokenizer)
        return Answer(
            chat=chat,
            id=answer_id,
            model=body.model or self._services.served_model().name,
            n=body.n,
            prompts=len(prepared),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs is not None,
            echo=echo,
            return_token_ids=body.return_token_ids,
            options=body.stream_options or StreamOptions(),
        )

    async def _run(
        self,
        exchange: Exchange,
        body: SamplingBody,
        answer: Answer,
        prepared: Sequence[Prepared],
        *,
        shorten: bool = False,
    ) -> None:
        whole = WholeAnswer(answer)

        async def write(prompt: int, response: v1.GenerateResponse) -> None:
            is_prompt = response.HasField("prompt")
            if is_prompt:
                await answer.read_prompt(prompt, response.prompt, self._services.slices)
            for chunk in answer.chunks(prompt, response):
                if body.stream:
                    await exchange.event(chunk, large=is_prompt)
                else:
                    whole.add(chunk)

        caller = exchange.caller()
        generate = partial(self._generate, shorten=shorten)
        if len(prepared) == 1:
            await generate(caller, prepared[0], partial(write, 0), partial(answer.begin_prompt, 0))
        else:
            with request_span(self._services.tracer, caller.traceparent, caller.operation):
                part = replace(caller, operation=part_of(caller.operation, span_names.PROMPT))
                await run_together(
                    [
                        generate(part, each, partial(write, number), partial(answer.begin_prompt, number))
                        for number, each in enumerate(prepared)
                    ]
                )
        if not body.stream:
            await exchange.answer(whole.result())
            return
        last = [answer.usage_chunk()] if answer.options.include_usage else []
        await exchange.end_events(*last, timeout_s=self._services.config.stall_timeout_s)

    async def _generate(
        self,
        caller: Caller,
        prepared: Prepared,
        send: Send,
        prompt_encoded: Callable[[Sequence[int]], None],
        *,
        shorten: bool,
    ) -> None:
        try:
            await self._generator.run(prepared.request, caller, send, prompt_encoded=prompt_encoded, shorten=shorten)
        except QuireError as error:
            raise with_http_names(error, prepared.names) from None


def _check_size(body: SamplingBody, num_prompts: int, echoed_logprobs: int | None) -> None:
    """Check that the log-probabilities of prompts, which each choice repeats, are not too many.

    Raises:
        InvalidRequestError: they are.
    """
    field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    top = echoed_logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    if top is not None and (count := body.n * num_prompts * (top + 1)) > MAX_REPEATED_LOGPROBS:
        what = (
            f"too many log-probabilities of prompts: n x prompts x ({field} + 1) is {count}; "
            f"ask for at most {MAX_REPEATED_LOGPROBS}"
        )
        raise InvalidRequestError(FieldViolation(field, what))
