"""Runs requests from all HTTP APIs with the generator. The APIs differ only in their request and response formats."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from quire.v1 import generation_pb2 as v1
from services.access.shares import Slices
from services.calls.context import Caller, Services
from services.calls.generation import Generator
from services.calls.together import run_together
from services.calls.tracing import part_of, request_span
from services.http.bodies import checked
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model
from services.http.prompts import Prepared, prepare_chat
from services.http.schema import Body, ChatBody
from services.requests.validation import check_num_requests
from shared import span_names
from shared.errors import QuireError

Json = dict[str, Any]

_WITH_PARTS = ("tools", "stop")
"""Fields whose subfields have the same names in all APIs."""


@dataclass(frozen=True, slots=True)
class ConvertedChat:
    """A request in another API's format, converted to a Chat request."""

    body: Json
    """Fields of a `ChatBody`."""
    names: Mapping[str, str]
    """The client's field names by their paths in the body, for errors."""

    def name_of(self, path: str) -> str:
        """Return the client's name for a field. Generated parts of the body have no client name."""
        for end in [len(path), *(at for at in range(len(path) - 1, 0, -1) if path[at] in ".[")]:
            name = self.names.get(path[:end])
            if name is not None:
                return name + path[end:] if path.startswith(_WITH_PARTS) else name
        return path


def options_of(body: Body, group: type[Body]) -> Json:
    """Return the fields of a body that belong to a shared group, such as `ScheduledBody`."""
    return {name: getattr(body, name) for name in group.model_fields}


class ApiAnswer(Protocol):
    """Writes a response in an API's format."""

    def begin_prompt(self, prompt: int, token_ids: Sequence[int], /) -> None:
        """Record the tokens of a prompt."""

    async def read_prompt(self, prompt: int, event: v1.Prompt, slices: Slices, /) -> None:
        """Read the log-probabilities of a prompt in slices, because there may be very many; called before `events`."""

    def events(self, prompt: int, message: v1.GenerateResponse, /) -> Iterable[Json]:
        """Return the events to send for the generator's next message about a prompt."""

    def last(self) -> Iterable[Json]:
        """Return the events after the last message."""


class Runner:
    """Runs the requests of one front-end process."""

    def __init__(self, services: Services, generator: Generator) -> None:
        self._services = services
        self._generator = generator

    def prepare(self, converted: ConvertedChat, request_id: str) -> Prepared:
        """Return the request for a chat; errors have the client's names of fields.

        Raises:
            QuireError: the chat is invalid, or names another model.
        """
        try:
            chat = checked(ChatBody, converted.body)
            choose_model(self._services, chat.model)
            prepared = prepare_chat(chat, request_id, strict_order=self._services.tokenizer.has_strict_template)
        except QuireError as error:
            raise with_http_names(error, converted.name_of) from None
        return Prepared(prepared.request, lambda path: converted.name_of(prepared.names(path)))

    async def run(
        self,
        exchange: Exchange,
        prepared: Sequence[Prepared],
        answer: ApiAnswer,
        *,
        whole: Callable[[], Json] | None,
        finished: Callable[[], None] = lambda: None,
        shorten: bool = False,
    ) -> None:
        """Generate the outputs until the client disconnects, and send their events or the whole response.

        Args:
            exchange: the request.
            prepared: a request for each prompt.
            answer: converts the outputs to the format of the API.
            whole: returns the whole response; None to send events.
            finished: called when the output of a prompt is complete, before its end is sent.
            shorten: reduce the maximum output length to the remaining context, instead of raising an error.

        Raises:
            QuireError: the request failed.
        """
        if len(prepared) > 1:
            first = prepared[0]
            num_choices = first.request.sampling.n if first.request.sampling.HasField("n") else 1
            try:
                check_num_requests(num_choices, self._services.link.max_call_requests, num_prompts=len(prepared))
            except QuireError as error:
                raise with_http_names(error, first.names) from None

        async def send(prompt: int, message: v1.GenerateResponse) -> None:
            is_prompt = message.HasField("prompt")
            if is_prompt:
                await answer.read_prompt(prompt, message.prompt, self._services.slices)
            events = answer.events(prompt, message)
            if message.HasField("finished"):
                finished()
            for event in events:
                if whole is None:
                    await exchange.event(event, large=is_prompt)

        async def generate(caller: Caller, number: int) -> None:
            request, encoded = prepared[number], partial(answer.begin_prompt, number)
            try:
                await self._generator.run(
                    request.request, caller, partial(send, number), prompt_encoded=encoded, shorten=shorten
                )
            except QuireError as error:
                raise with_http_names(error, request.names) from None

        async def serve() -> None:
            caller = exchange.caller()
            if len(prepared) == 1:
                await generate(caller, 0)
            else:
                with request_span(self._services.tracer, caller.traceparent, caller.operation):
                    part = replace(caller, operation=part_of(caller.operation, span_names.PROMPT))
                    await run_together([generate(part, number) for number in range(len(prepared))])
            if whole is not None:
                await exchange.answer(whole())
            else:
                await exchange.end_events(*answer.last(), timeout_s=self._services.config.stall_timeout_s)

        await exchange.run_until_disconnect(serve())
