"""Tokenize and Detokenize, independent of the protocol."""

from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.requests.prompts import Prompts
from services.requests.validation import check_model, check_text, check_token_ids
from services.text.chat import check_chat
from shared.errors import FieldViolation, InvalidRequestError


class Texts:
    """Tokenizer operations of one front-end process."""

    def __init__(self, services: Services, prompts: Prompts) -> None:
        self._services = services
        self._prompts = prompts

    async def tokenize(self, request: v1.TokenizeRequest) -> v1.TokenizeResponse:
        """Return the token ids for a text or a conversation.

        Raises:
            QuireError: the request is invalid, or no model is served.
        """
        model, tokenizer = self._services.served_model(), self._services.tokenizer
        check_model(request.model, model)
        violations: list[FieldViolation] = []
        match request.WhichOneof("input"):
            case "text":
                violations += check_text(request.text, "text", may_be_empty=True)
            case "chat":
                violations += check_chat(request.chat, tokenizer.has_chat_template)
            case _:
                violations.append(FieldViolation("input", "missing; add one of `text` and `chat`"))
        if violations:
            raise InvalidRequestError(*violations)
        if request.HasField("chat"):
            ids = await self._prompts.encode_chat(request.chat)
        else:
            ids = await tokenizer.encode(request.text, add_special_tokens=not request.omit_special_tokens)
        return v1.TokenizeResponse(token_ids=ids, max_model_len=model.max_model_len)

    async def detokenize(self, request: v1.DetokenizeRequest) -> v1.DetokenizeResponse:
        """Return the text of token ids.

        Raises:
            QuireError: the request is invalid, or no model is served.
        """
        model = self._services.served_model()
        ids = list(request.token_ids)
        check_model(request.model, model)
        violations = [*check_token_ids(ids, model.vocab_size, "token_ids")]
        if violations:
            raise InvalidRequestError(*violations)
        skip_special_tokens = not request.include_special_tokens
        text = await self._services.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return v1.DetokenizeResponse(text=text)
