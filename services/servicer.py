"""The calls of `quire.v1.GenerationService`: from what gRPC gives to values, from what `generation` sends to gRPC."""

from collections.abc import AsyncIterator

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.batch import Batch
from services.boundary import Context, caller_of
from services.collect import Collector
from services.embeddings import Embedder
from services.generation import Generator
from services.texts import Texts
from services.tracing import rpc
from shared.errors import FieldViolation, InvalidRequestError

REQUEST_ID_KEY = "quire-request-id"
"""The initial metadata entry with the id a request runs under."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves one front-end process."""

    def __init__(self, generator: Generator, embedder: Embedder, texts: Texts) -> None:
        self._generator = generator
        self._embedder = embedder
        self._texts = texts

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Generates from one prompt; see the proto."""

        async def begun(request_id: str) -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        await self._generator.run(request, caller_of(context, rpc("Generate")), context.write, begun=begun)

    async def GenerateOnce(self, request: v1.GenerateOnceRequest, context: Context) -> v1.GenerateOnceResponse:
        """Generates from one prompt and answers once."""
        if not request.HasField("request"):
            raise InvalidRequestError(FieldViolation("request", "missing"))
        collector = Collector()
        await self._generator.run(request.request, caller_of(context, rpc("GenerateOnce")), collector.send)
        return collector.response()

    async def GenerateBatch(  # type: ignore[override]
        self, requests: AsyncIterator[v1.GenerateBatchRequest], context: Context
    ) -> None:
        """Generates from many prompts on one call."""
        batch = Batch(self._generator, lambda: caller_of(context, rpc("GenerateBatch")), context.write)
        await batch.run(requests)

    async def Resume(self, request: v1.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Goes on with a request whose connection was lost."""

        async def begun(request_id: str) -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        async def send(response: v1.GenerateResponse) -> None:
            await context.write(v1.ResumeResponse(response=response))

        await self._generator.resume(request, caller_of(context, rpc("Resume")), send, begun=begun)

    async def Cancel(self, request: v1.CancelRequest, context: Context) -> v1.CancelResponse:
        """Ends a resumable request."""
        await self._generator.cancel(request.request_id, caller_of(context, rpc("Cancel")).principal)
        return v1.CancelResponse()

    async def Embed(self, request: v1.EmbedRequest, context: Context) -> v1.EmbedResponse:
        """Turns prompts into vectors."""
        return await self._embedder.run(request, caller_of(context, rpc("Embed")))

    async def Tokenize(self, request: v1.TokenizeRequest, context: Context) -> v1.TokenizeResponse:
        """Turns text or a conversation into token ids."""
        return await self._texts.tokenize(request)

    async def Detokenize(self, request: v1.DetokenizeRequest, context: Context) -> v1.DetokenizeResponse:
        """Turns token ids into text."""
        return await self._texts.detokenize(request)
