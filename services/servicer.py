"""The calls of `quire.v1.GenerationService`: from what gRPC gives to values, from what `generation` sends to gRPC."""

import time

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.boundary import Context
from services.chat import check_chat
from services.collect import Collector
from services.generation import Caller, Generator, Services
from services.tracing import TRACEPARENT_KEY
from services.validation import check_model, check_text, check_token_ids
from shared.errors import FieldViolation, InvalidRequestError

REQUEST_ID_KEY = "quire-request-id"
"""The initial metadata entry with the id a request runs under."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one front-end process."""

    def __init__(self, services: Services, generator: Generator) -> None:
        self._services = services
        self._generator = generator

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Generates from one prompt; see the proto."""

        async def begun(request_id: str) -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        await self._generator.run(request, _caller(context, "Generate"), context.write, begun=begun)

    async def GenerateOnce(self, request: v1.GenerateOnceRequest, context: Context) -> v1.GenerateOnceResponse:
        """Generates from one prompt and answers once."""
        if not request.HasField("request"):
            raise InvalidRequestError(FieldViolation("request", "missing"))
        collector = Collector()
        await self._generator.run(request.request, _caller(context, "GenerateOnce"), collector.send)
        return collector.response()

    async def Tokenize(self, request: v1.TokenizeRequest, context: Context) -> v1.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        model, tokenizer = self._services.served_model(), self._services.tokenizer
        violations = [*check_model(request.model, model)]
        match request.WhichOneof("input"):
            case "text":
                violations += check_text(request.text, "text", may_be_empty=True)
            case "chat":
                violations += check_chat(request.chat, tokenizer.has_chat_template)
            case _:
                violations.append(FieldViolation("input", "missing; give one of `text` and `chat`"))
        if violations:
            raise InvalidRequestError(*violations)
        if request.HasField("chat"):
            ids = await self._generator.encode_chat(request.chat)
        else:
            ids = await tokenizer.encode(request.text, add_special_tokens=not request.omit_special_tokens)
        return v1.TokenizeResponse(token_ids=ids, max_model_len=model.max_model_len)

    async def Detokenize(self, request: v1.DetokenizeRequest, context: Context) -> v1.DetokenizeResponse:
        """Turns token ids into text."""
        model = self._services.served_model()
        ids = list(request.token_ids)
        violations = [*check_model(request.model, model), *check_token_ids(ids, model.vocab_size, "token_ids")]
        if violations:
            raise InvalidRequestError(*violations)
        skip_special_tokens = not request.include_special_tokens
        text = await self._services.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return v1.DetokenizeResponse(text=text)


def _caller(context: Context, method: str) -> Caller:
    """Who calls, as gRPC says."""
    metadata = dict(context.invocation_metadata() or ())
    arrival, left = time.monotonic(), context.time_remaining()
    return Caller(
        method=method,
        traceparent=str(metadata.get(TRACEPARENT_KEY, "")),
        arrival=arrival,
        deadline=None if left is None else arrival + left,
    )
