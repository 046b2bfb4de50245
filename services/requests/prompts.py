"""Encodes prompts and bad words of a request as token ids."""

from collections.abc import Sequence
from functools import partial

from opentelemetry.trace import Tracer

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.requests.validation import ValidRequest
from services.tail import part_span
from services.text.chat import chat_size, template_input
from services.text.chat_template import ChatTemplateError
from services.text.tokenizer import TextTokenizer
from shared import span_names
from shared.columns import from_column, to_column
from shared.errors import FieldViolation, InvalidRequestError


class Prompts:
    """Encoder of one front-end process."""

    def __init__(self, tokenizer: TextTokenizer, tracer: Tracer) -> None:
        self._tokenizer = tokenizer
        self._tracer = tracer

    async def encode(
        self, request: v1.GenerateRequest | v1.EmbedInput, model: link_pb2.ServedModel, field_name: str
    ) -> Sequence[int]:
        """Return the prompt's token ids for a valid request; `field_name` names the prompt's field in errors.

        Raises:
            InvalidRequestError: the chat template rejects it, or the model lacks one of its tokens.
        """
        with part_span(self._tracer, span_names.TOKENIZE) as span:
            match request.WhichOneof("input"):
                case "text":
                    prompt: Sequence[int] = await self._tokenizer.encode(request.text)
                case "chat":
                    assert isinstance(request, v1.GenerateRequest)
                    prompt = await self.encode_chat(request.chat)
                case _:
                    prompt = list(request.token_ids.ids)
            if prompt and max(prompt) >= model.vocab_size:
                # A tokenizer may have more tokens than the model, for example tokens added for training.
                wrong = max(prompt)
                text = self._tokenizer.token_bytes(wrong).decode(errors="replace")
                raise InvalidRequestError(
                    FieldViolation(
                        field_name,
                        f"contains token {wrong} ({text!r}), which the model does not have; remove that text",
                    )
                )
            span.set_attribute("gen_ai.usage.input_tokens", len(prompt))
        return prompt

    async def encode_chat(self, chat: v1.ChatInput, field_name: str = "chat") -> list[int]:
        """Return the token ids of a valid conversation.

        Raises:
            InvalidRequestError: the template rejects it.
        """
        try:
            return await self._tokenizer.encode_chat(partial(template_input, chat), chat_size(chat))
        except ChatTemplateError as error:
            raise InvalidRequestError(
                FieldViolation(field_name, f"rejected by the model's chat template: {error}")
            ) from None

    async def add_bad_words(self, valid: ValidRequest, model: link_pb2.ServedModel) -> None:
        """Add the tokens of the request's bad words, with and without a leading space, to the sampling parameters."""
        if not valid.bad_words:
            return
        banned = set(from_column(valid.sampling.banned_token_ids).tolist())
        longer = set()
        for word in valid.bad_words:
            for text in (word, f" {word.lstrip()}"):
                ids = tuple(await self._tokenizer.encode(text, add_special_tokens=False))
                if len(ids) == 1:
                    banned.add(ids[0])
                elif ids:
                    longer.add(ids)
        # The model never samples tokens outside its vocabulary.
        banned = {token for token in banned if token < model.vocab_size}
        longer = {ids for ids in longer if max(ids) < model.vocab_size}
        allowed = set(from_column(valid.sampling.allowed_token_ids).tolist())
        if allowed <= banned if allowed else len(banned) >= model.vocab_size:
            raise InvalidRequestError(
                FieldViolation("sampling.bad_words", "no token is left to sample; use fewer bad words")
            )
        valid.sampling.banned_token_ids = to_column(sorted(banned))
        valid.sampling.bad_words.extend(to_column(ids) for ids in sorted(longer))
