"""`/v1/completions` and `/v1/chat/completions`."""

from collections.abc import Sequence
from functools import partial

from services.calls.context import Services
from services.http.answers import Answer
from services.http.bodies import parse
from services.http.endpoint import Exchange
from services.http.identity import choose_model, choose_request_id
from services.http.logprobs import Logprobs
from services.http.prompts import Prepared, prepare_chat, prepare_completion, prompts_of
from services.http.runner import Runner
from services.http.schema import ChatBody, CompletionBody, SamplingBody, StreamOptions
from services.http.whole_answer import WholeAnswer
from shared.errors import FieldViolation, InvalidRequestError

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` for completions that do not set it, as in OpenAI's API and vLLM. A bare prompt may have no natural end.
"""

MAX_REPEATED_LOGPROBS = 1024
"""Maximum number of log-probabilities per prompt token, summed over all prompts and choices of a request."""


class GenerationEndpoints:
    """Endpoints of completions and chat completions."""

    def __init__(self, services: Services, runner: Runner) -> None:
        self._services = services
        self._runner = runner

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
        await self._serve(
            exchange,
            body,
            f"cmpl-{request_id}",
            prepared,
            top_logprobs=body.logprobs,
            echo=body.echo,
            shorten=uses_default,
        )

    async def chat(self, exchange: Exchange) -> None:
        """Serve `/v1/chat/completions`."""
        body = await exchange.read(partial(parse, ChatBody))
        request_id = choose_request_id(exchange, body)
        prepared = prepare_chat(body, request_id, strict_order=self._services.tokenizer.has_strict_template)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        await self._serve(exchange, body, f"chatcmpl-{request_id}", [prepared], top_logprobs=top_logprobs, chat=True)

    async def _serve(
        self,
        exchange: Exchange,
        body: SamplingBody,
        answer_id: str,
        prepared: Sequence[Prepared],
        *,
        top_logprobs: int | None,
        echo: bool = False,
        chat: bool = False,
        shorten: bool = False,
    ) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError(FieldViolation("stream_options", "requires stream; set stream to true"))
        choose_model(self._services, body.model)
        _check_size(body, len(prepared), top_logprobs if echo else None)
        logprobs = None
        if top_logprobs is not None:
            tokenizer = self._services.tokenizer
            detokenizer = partial(tokenizer.detokenizer, skip_special_tokens=body.skip_special_tokens)
            logprobs = Logprobs(top_logprobs, body.return_tokens_as_token_ids, tokenizer.token_bytes, detokenizer)
        form = Answer if body.stream else WholeAnswer
        answer = form(
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
        whole = answer.whole if isinstance(answer, WholeAnswer) else None
        await self._runner.run(exchange, prepared, answer, whole=whole, shorten=shorten)


def _check_size(body: SamplingBody, num_prompts: int, echoed_logprobs: int | None) -> None:
    """Check the number of prompt log-probabilities, which each choice repeats.

    Raises: InvalidRequestError: there are too many.
    """
    field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    top = echoed_logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    if top is not None and (count := body.n * num_prompts * (top + 1)) > MAX_REPEATED_LOGPROBS:
        what = (
            f"too many log-probabilities of prompts: n x prompts x ({field} + 1) is {count}; "
            f"ask for at most {MAX_REPEATED_LOGPROBS}"
        )
        raise InvalidRequestError(FieldViolation(field, what))
