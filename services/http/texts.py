"""`/v1/models`, `/tokenize`, `/detokenize`: `services.calls.texts` in the forms of OpenAI and vLLM."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.texts import Texts
from services.http.bodies import parse
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model
from services.http.prompts import fill_chat
from services.http.sampling import field_names
from services.http.schema import DetokenizeBody, TokenizeBody
from services.requests.validation import check_model
from shared.errors import FieldViolation, InvalidRequestError, QuireError

_TOKENIZE_NAMES = field_names(
    {
        "text": "prompt",
        "chat.tools_json": "tools",
        "chat.template_variables_json": "chat_template_kwargs",
        "chat.messages": "messages",
        "chat": "messages",
        "token_ids": "tokens",
    }
)


class TextEndpoints:
    """Endpoints that generate nothing."""

    def __init__(self, services: Services, texts: Texts) -> None:
        self._services = services
        self._texts = texts
        self._started = int(time.time())

    async def list_models(self, exchange: Exchange) -> None:
        """Serve `/v1/models`: the served model, or none before the first worker has joined."""
        model = self._services.link.model
        models = [] if model is None else [self._model(model)]
        ends = dict.fromkeys(("first_id", "last_id"), models[0]["id"] if models else None)
        await exchange.answer({"object": "list", "data": models, "has_more": False, **ends})

    async def get_model(self, exchange: Exchange) -> None:
        """Serve `/v1/models/NAME`."""
        name = exchange.params["name"]
        model = self._services.served_model()
        check_model(name, model)
        await exchange.answer(self._model(model))

    async def tokenize(self, exchange: Exchange) -> None:
        """Serve `/tokenize`."""
        body = await exchange.read(partial(parse, TokenizeBody))
        choose_model(self._services, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError(FieldViolation("prompt", "give exactly one of prompt and messages"))
        request = v1.TokenizeRequest(omit_special_tokens=not body.add_special_tokens)
        if body.messages is None:
            request.text = body.prompt or ""
        else:
            fill_chat(
                request.chat,
                body.messages,
                body.tools or [],
                body.chat_template_kwargs,
                strict_order=self._services.tokenizer.has_strict_template,
            )
            request.chat.omit_generation_prompt = not body.add_generation_prompt or body.continue_final_message
            request.chat.continue_final_message = body.continue_final_message
        try:
            response = await self._texts.tokenize(request)
        except QuireError as error:
            raise with_http_names(error, _TOKENIZE_NAMES) from None
        tokens = list(response.token_ids)
        await exchange.answer({"count": len(tokens), "max_model_len": response.max_model_len, "tokens": tokens})

    async def detokenize(self, exchange: Exchange) -> None:
        """Serve `/detokenize`."""
        body = await exchange.read(partial(parse, DetokenizeBody))
        choose_model(self._services, body.model)
        request = v1.DetokenizeRequest(token_ids=body.tokens, include_special_tokens=True)
        try:
            response = await self._texts.detokenize(request)
        except QuireError as error:
            raise with_http_names(error, _TOKENIZE_NAMES) from None
        await exchange.answer({"prompt": response.text})

    def _model(self, model: link_pb2.ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "quire",
            "root": model.name,
            "parent": None,
            # Clients of Anthropic's API read these three fields.
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat().replace("+00:00", "Z"),
            "max_model_len": model.max_model_len,
            "sampling_defaults": dict(self._services.defaults.values),
        }
