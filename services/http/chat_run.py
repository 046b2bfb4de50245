"""Runs a chat for the Responses and the Messages API, which differ in the forms that they read and write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.generation import Generator
from services.http.bodies import checked
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model
from services.http.output import ChatOutput
from services.http.prompts import Prepared, prepare_chat
from services.http.schema import Body, ChatBody
from shared.errors import QuireError

Json = dict[str, Any]

_WITH_PARTS = ("tools", "stop")
"""Fields whose parts have the same names in all APIs."""


@dataclass(frozen=True, slots=True)
class ConvertedChat:
    """A request of another API as a request of the Chat API."""

    body: Json
    """Fields of a `ChatBody`."""
    names: Mapping[str, str]
    """The client's names of fields, by their paths in the body, for errors."""

    def name_of(self, path: str) -> str:
        """Return the client's name of a field. Parts of a field that the client did not write have no names."""
        for end in [len(path), *(at for at in range(len(path) - 1, 0, -1) if path[at] in ".[")]:
            name = self.names.get(path[:end])
            if name is not None:
                return name + path[end:] if path.startswith(_WITH_PARTS) else name
        return path


def options_of(body: Body, group: type[Body]) -> Json:
    """Return a body's fields of a group that has the same names in several APIs, such as `ScheduledBody`."""
    return {name: getattr(body, name) for name in group.model_fields}


class ChatAnswer(Protocol):
    """Writer of an output in the form of an API."""

    output: ChatOutput

    def begin(self) -> Iterator[Json]:
        """Yield the events before the output."""

    def events(self, message: v1.GenerateResponse, /) -> Iterator[Json]:
        """Yield the events of the generator's next message."""


class ChatRunner:
    """Runs chats of one front-end process."""

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
        prepared: Prepared,
        answer: ChatAnswer,
        whole: Callable[[], Json],
        *,
        stream: bool,
        finished: Callable[[], None] = lambda: None,
        shorten: bool = False,
    ) -> None:
        """Generate the output, and send its events or the whole answer.

        Args:
            exchange: the request.
            prepared: the chat.
            answer: writes the output.
            whole: returns the whole answer.
            stream: whether to send events.
            finished: called when the output is complete, before its end is sent.
            shorten: reduce the maximum length of the output to the room in the context, instead of an error.

        Raises:
            QuireError: the request failed.
        """
        begun = False

        async def send(message: v1.GenerateResponse) -> None:
            nonlocal begun
            events = [] if begun else [*answer.begin()]
            begun = True
            events += answer.events(message)
            if answer.output.finished is not None:
                finished()
            for event in events:
                if stream:
                    await exchange.event(event)

        def encoded(token_ids: Sequence[int]) -> None:
            answer.output.prompt_tokens = len(token_ids)

        try:
            await self._generator.run(
                prepared.request, exchange.caller(), send, prompt_encoded=encoded, shorten=shorten
            )
        except QuireError as error:
            raise with_http_names(error, prepared.names) from None
        if not stream:
            await exchange.answer(whole())
            return
        await exchange.end_events(timeout_s=self._services.config.stall_timeout_s)
