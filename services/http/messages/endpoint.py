"""`/v1/messages` and `/v1/messages/count_tokens`."""

from functools import partial

from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.texts import Texts
from services.http.bodies import parse
from services.http.endpoint import Exchange
from services.http.identity import choose_request_id
from services.http.messages.answer import MessagesAnswer
from services.http.messages.conversion import to_chat
from services.http.messages.schema import CountTokensBody, MessagesBody
from services.http.output import ChatOutput
from services.http.runner import Runner


class MessagesEndpoints:
    """Endpoints of the Messages API."""

    def __init__(self, services: Services, runner: Runner, texts: Texts) -> None:
        self._services = services
        self._runner = runner
        self._texts = texts

    async def create(self, exchange: Exchange) -> None:
        """Serve `/v1/messages`."""
        body = await exchange.read(partial(parse, MessagesBody))
        request_id = choose_request_id(exchange, body)
        prepared = self._runner.prepare(to_chat(body), request_id)
        model = self._services.served_model().name
        answer = MessagesAnswer(f"msg_{request_id}", model, ChatOutput(self._services.tokenizer.token_bytes))
        # Reduce max_tokens if necessary: clients must send a value, which may exceed the context of a small model.
        whole = None if body.stream else answer.message
        await self._runner.run(exchange, [prepared], answer, whole=whole, shorten=True)

    async def count_tokens(self, exchange: Exchange) -> None:
        """Serve `/v1/messages/count_tokens`."""
        body = await exchange.read(partial(parse, CountTokensBody))
        prepared = self._runner.prepare(to_chat(body), choose_request_id(exchange, body))
        response = await self._texts.tokenize(v1.TokenizeRequest(chat=prepared.request.chat))
        await exchange.answer({"input_tokens": len(response.token_ids)})
