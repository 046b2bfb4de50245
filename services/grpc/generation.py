"""`quire.v1.GenerationService`: connects gRPC calls to `generation`, `batch`, `embeddings` and `texts`."""

from collections.abc import AsyncIterator

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.access.shares import Turns
from services.calls.collect import Collector
from services.calls.embeddings import Embedder
from services.calls.generation import Generator
from services.calls.texts import Texts
from services.calls.tracing import rpc
from services.grpc.batch import Batch
from services.grpc.boundary import Context, make_caller
from shared.errors import FieldViolation, InvalidRequestError

REQUEST_ID_KEY = "quire-request-id"
"""Key of the initial metadata entry with the request's id."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Generation service of one front-end process."""

    def __init__(self, generator: Generator, embedder: Embedder, texts: Texts, large_requests: Turns) -> None:
        self._large_requests = large_requests
        self._generator = generator
        self._embedder = embedder
        self._texts = texts

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Generate for one prompt and stream the output; see the proto."""

        async def begun(request_id: str) -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        await self._generator.run(request, make_caller(context, rpc("Generate")), context.write, begun=begun)

    async def GenerateOnce(self, request: v1.GenerateOnceRequest, context: Context) -> v1.GenerateOnceResponse:
        """Generate from one prompt and return one response."""
        if not request.HasField("request"):
            raise InvalidRequestError(FieldViolation("request", "missing; add the request to generate from"))
        collector = Collector()
        await self._generator.run(request.request, make_caller(context, rpc("GenerateOnce")), collector.send)
        return collector.response()

    async def GenerateBatch(  # type: ignore[override]
        self, requests: AsyncIterator[v1.GenerateBatchRequest], context: Context
    ) -> None:
        """Generate from many prompts on one call."""
        batch = Batch(
            self._generator, lambda: make_caller(context, rpc("GenerateBatch")), context.write, self._large_requests
        )
        await batch.run(requests)

    async def Resume(self, request: v1.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Resume a request after a lost connection."""

        async def begun(request_id: str) -> None:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))

        async def send(response: v1.GenerateResponse) -> None:
            await context.write(v1.ResumeResponse(response=response))

        await self._generator.resume(request, make_caller(context, rpc("Resume")), send, begun=begun)

    async def Cancel(self, request: v1.CancelRequest, context: Context) -> v1.CancelResponse:
        """Cancel a resumable request."""
        await self._generator.cancel(request.request_id, make_caller(context, rpc("Cancel")).principal)
        return v1.CancelResponse()

    async def Embed(self, request: v1.EmbedRequest, context: Context) -> v1.EmbedResponse:
        """Return one vector per prompt."""
        return await self._embedder.run(request, make_caller(context, rpc("Embed")))

    async def Tokenize(self, request: v1.TokenizeRequest, context: Context) -> v1.TokenizeResponse:
        """Return the token ids for a text or a conversation."""
        return await self._texts.tokenize(request)

    async def Detokenize(self, request: v1.DetokenizeRequest, context: Context) -> v1.DetokenizeResponse:
        """Return the text of token ids."""
        return await self._texts.detokenize(request)
