"""`/v1/responses`: creates, returns and deletes responses, and counts the tokens of their input."""

from functools import partial

from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.calls.context import Services
from services.calls.texts import Texts
from services.http.bodies import parse
from services.http.endpoint import MAX_BODY_BYTES, Exchange
from services.http.identity import choose_request_id
from services.http.logprobs import Logprobs
from services.http.output import ChatOutput
from services.http.responses.answer import ResponsesAnswer
from services.http.responses.conversion import Json, to_chat, to_messages
from services.http.responses.schema import InputItem, ResponsesBody
from services.http.responses.store import ResponseStore, StoredResponse
from services.http.responses.stored import events_of, input_items
from services.http.runner import Runner
from shared.errors import FieldViolation, InvalidRequestError, RequestNotFoundError

_NOT_STORED = (
    "is not stored: it may be too old, stored by another front end, or sent with store: false;"
    " send the whole conversation as input"
)


class PreviousResponseError(InvalidRequestError):
    """The response to continue is not stored."""

    reason = "PREVIOUS_RESPONSE_NOT_FOUND"


class ResponsesEndpoints:
    """Endpoints of the Responses API."""

    def __init__(self, services: Services, runner: Runner, texts: Texts) -> None:
        self._services = services
        self._runner = runner
        self._texts = texts
        self._store = ResponseStore(services.config.response_store_bytes)

    async def create(self, exchange: Exchange) -> None:
        """Serve POST `/v1/responses`."""
        body = self._resolved(await exchange.read(partial(parse, ResponsesBody)))
        stored = self._previous(body)
        earlier = [] if stored is None else stored.messages
        request_id = choose_request_id(exchange, body)
        session_id = body.session_id or (request_id if stored is None else stored.session_id)
        prepared = self._runner.prepare(
            to_chat(body.model_copy(update={"session_id": session_id}), earlier), request_id
        )
        model = self._services.served_model().name
        logprobs = None
        if body.logprobs:
            tokenizer = self._services.tokenizer
            detokenizer = partial(tokenizer.detokenizer, skip_special_tokens=True)
            logprobs = Logprobs(body.top_logprobs or 0, False, tokenizer.token_bytes, detokenizer)
        output = ChatOutput(self._services.tokenizer.token_bytes)
        answer = ResponsesAnswer(body, f"resp_{request_id}", model, output, logprobs, self._services.defaults.values)
        principal = CURRENT.get().name

        def keep() -> None:
            if not body.store or self._store.is_off:
                return
            response = answer.response()
            items = [InputItem.model_validate(_as_input(item)) for item in response["output"]]
            before = [*earlier, *to_messages(body.input)]
            conversation = [*before, *to_messages(items)]
            self._store.put(principal, StoredResponse(response, conversation, len(before), session_id))

        whole = None if body.stream else answer.response
        await self._runner.run(exchange, [prepared], answer, whole=whole, finished=keep)

    async def count_tokens(self, exchange: Exchange) -> None:
        """Serve POST `/v1/responses/input_tokens`."""
        body = self._resolved(await exchange.read(partial(parse, ResponsesBody)))
        stored = self._previous(body)
        chat = to_chat(body, [] if stored is None else stored.messages)
        prepared = self._runner.prepare(chat, choose_request_id(exchange, body))
        response = await self._texts.tokenize(v1.TokenizeRequest(chat=prepared.request.chat))
        await exchange.answer({"object": "response.input_tokens", "input_tokens": len(response.token_ids)})

    async def get(self, exchange: Exchange) -> None:
        """Serve GET `/v1/responses/ID`, with `stream=true` as events."""
        response = self._stored(exchange.params["id"]).response
        query = exchange.query
        if not query.flag("stream"):
            await exchange.answer(response)
            return
        after = query.integer("starting_after", -1, least=0)
        await exchange.end_events(
            *(event for event in events_of(response) if event["sequence_number"] > after),
            timeout_s=self._services.config.stall_timeout_s,
        )

    async def input_items(self, exchange: Exchange) -> None:
        """Serve GET `/v1/responses/ID/input_items`, a page at a time, by default the newest first."""
        query = exchange.query
        stored = self._stored(exchange.params["id"])
        items = input_items(stored.response["id"], stored.messages[: stored.num_input])
        if query.choice("order", ("desc", "asc")) == "desc":
            items.reverse()
        limit = query.integer("limit", 20, least=1, most=100)
        first = 0
        if after := query.text("after"):
            first = next((number for number, item in enumerate(items, 1) if item["id"] == after), 0)
            if not first:
                raise InvalidRequestError(FieldViolation("after", "not an item of this input; use the id of one"))
        page = items[first : first + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        has_more = len(items) > first + limit
        await exchange.answer({"object": "list", "data": page, **ends, "has_more": has_more})

    async def cancel(self, exchange: Exchange) -> None:
        """Refuse POST `/v1/responses/ID/cancel`, because a stored response has already ended."""
        self._stored(exchange.params["id"])
        what = "cannot be cancelled, because it has ended; to cancel a response, close its connection"
        raise InvalidRequestError(FieldViolation("response_id", what))

    async def delete(self, exchange: Exchange) -> None:
        """Serve DELETE `/v1/responses/ID`."""
        response_id = exchange.params["id"]
        self._stored(response_id)
        self._store.drop(CURRENT.get().name, response_id)
        await exchange.answer({"id": response_id, "object": "response", "deleted": True})

    def _resolved(self, body: ResponsesBody) -> ResponsesBody:
        """Return the body with references to stored items replaced by the items.

        Raises:
            InvalidRequestError: an item is not stored, or the items together are larger than a body may be.
        """
        if isinstance(body.input, str):
            return body
        stored: dict[str, tuple[InputItem, int]] = {}
        resolved, num_bytes = [], 0
        for number, item in enumerate(body.input):
            if item.type != "item_reference":
                resolved.append(item)
                continue
            if item.id not in stored:
                found = self._item(item.id, number)
                stored[item.id] = found, len(found.model_dump_json().encode())
            found, size = stored[item.id]
            num_bytes += size
            # A short body may refer to a large item thousands of times.
            if num_bytes > MAX_BODY_BYTES:
                what = f"the stored items of this input have more than {MAX_BODY_BYTES} bytes; refer to fewer items"
                raise InvalidRequestError(FieldViolation(f"input[{number}].id", what))
            resolved.append(found)
        return body.model_copy(update={"input": resolved})

    def _item(self, item_id: str, number: int) -> InputItem:
        stored = self._store.item(CURRENT.get().name, item_id)
        if stored is None:
            what = f"item {item_id[:64]!r} is not stored; send the item itself, and store: false"
            raise InvalidRequestError(FieldViolation(f"input[{number}].id", what))
        return InputItem.model_validate(_as_input(stored))

    def _previous(self, body: ResponsesBody) -> StoredResponse | None:
        """Return the response that the request continues; None if it continues none."""
        if body.previous_response_id is None:
            return None
        if self._store.is_off:
            what = "this server stores no responses; send the whole conversation as input"
            raise InvalidRequestError(FieldViolation("previous_response_id", what))
        stored = self._store.get(CURRENT.get().name, body.previous_response_id)
        if stored is None:
            what = f"response {body.previous_response_id[:64]!r} {_NOT_STORED}"
            raise PreviousResponseError(FieldViolation("previous_response_id", what))
        return stored

    def _stored(self, response_id: str) -> StoredResponse:
        stored = self._store.get(CURRENT.get().name, response_id)
        if stored is None:
            raise RequestNotFoundError(f"response {response_id[:64]!r} {_NOT_STORED}")
        return stored


def _as_input(item: Json) -> Json:
    """Return an output item as an input item."""
    names = ("type", "role", "call_id", "namespace", "name", "arguments", "input")
    known: Json = {name: item[name] for name in names if name in item}
    if item["type"] == "message":
        known["content"] = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
    return known
