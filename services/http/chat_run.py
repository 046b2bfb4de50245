"""Runs a chat for the Responses and the Messages API, which differ in the forms that they read and write."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.generation import Generator
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model
from services.http.output import ChatOutput
from services.http.prompts import Prepared, prepare_chat
from services.http.schema import ChatBody
from services.http.turns import in_strict_order
from shared.errors import QuireError

Json = dict[str, Any]


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

    def prepare(self, make: Callable[[], ChatBody], request_id: str, fields: Mapping[str, str]) -> Prepared:
        """Return the request of the chat that `make` returns; errors have the names of `fields`.

        Raises:
            QuireError: the chat is invalid, or names another model.
        """
        try:
            chat = make()
            choose_model(self._services, chat.model)
            if self._services.tokenizer.has_strict_template:
                chat = chat.model_copy(update={"messages": in_strict_order(chat.messages)})
            prepared = prepare_chat(chat, request_id)
        except QuireError as error:
            raise with_http_names(error, lambda path: _renamed(path, fields)) from None
        return prepared

    async def run(
        self,
        exchange: Exchange,
        prepared: Prepared,
        answer: ChatAnswer,
        fields: Mapping[str, str],
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
            fields: names of fields in errors.
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
            raise with_http_names(error, lambda path: _renamed(prepared.names(path), fields)) from None
        if not stream:
            await exchange.answer(whole())
            return
        await exchange.end_events(timeout_s=self._services.config.stall_timeout_s)


def _renamed(path: str, fields: Mapping[str, str]) -> str:
    """Return the name of a field in another API; the parts of a renamed field have no names."""
    first = path.partition("[")[0].partition(".")[0]
    return fields.get(first, path)
