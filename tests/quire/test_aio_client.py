"""What the asyncio client promises beyond sharing its mapping with the blocking one."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from quire import AsyncClient, Delta, FinishReason, Tokenized, errors
from quire.v1 import generation_pb2 as pb
from tests.quire.scripted_server import ScriptedServer, delta, fail, finished, reason, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Yield a scripted server."""
    with scripted_server() as running:
        yield running


def _endless(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    while context.is_active():
        yield delta(0, [1], "x")


def test_deltas_then_finished(server: ScriptedServer) -> None:
    """`async for` gives the deltas in order; `finished` is there afterwards."""
    server.script = lambda _request, _context: [delta(0, [1], "a"), delta(1, [2], "b"), finished()]

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            generation = client.generate("text")
            deltas = [delta async for delta in generation]

            assert deltas == [Delta(0, 0, (1,), "a"), Delta(0, 1, (2,), "b")]
            assert generation.finished is not None
            assert generation.finished.reason is FinishReason.LENGTH

    asyncio.run(run())


def test_many_generations_share_one_connection(server: ScriptedServer) -> None:
    """Requests of one client run at the same time and do not mix."""
    server.script = lambda request, _context: [delta(0, request.token_ids.ids, request.request_id), finished()]

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            generations = [client.generate(token_ids=[n], request_id=f"r{n}") for n in range(50)]
            completions = await asyncio.gather(*(generation.result() for generation in generations))

        assert [(c.text, c.token_ids) for c in completions] == [(f"r{n}", (n,)) for n in range(50)]

    asyncio.run(run())


def test_a_refusal_is_a_typed_error(server: ScriptedServer) -> None:
    """Streaming and unary calls raise the same classes as the blocking client's."""
    server.script = lambda _request, context: fail(
        context, grpc.StatusCode.UNAVAILABLE, "no worker", reason("NO_WORKER")
    )

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            with pytest.raises(errors.UnavailableError) as caught:
                await client.generate("text").result()
            assert caught.value.reason == "NO_WORKER"
            with pytest.raises(errors.ModelNotFoundError):
                await client.get_model("other")

    asyncio.run(run())


def test_cancel_raises_our_error_and_cancelling_the_task_asyncios(server: ScriptedServer) -> None:
    """`cancel()` ends the iteration with QuireError; a cancelled task ends as asyncio expects, and the call too."""
    server.script = _endless

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            generation = client.generate("text")
            await anext(generation)
            generation.cancel()
            with pytest.raises(errors.CancelledError):
                await generation.result()
            assert await asyncio.to_thread(server.cancelled.wait, 30)

            server.cancelled.clear()
            assert server.asked.acquire(blocking=False)
            reading = asyncio.create_task(client.generate("text").result())
            assert await asyncio.to_thread(server.asked.acquire, timeout=30)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await asyncio.to_thread(server.cancelled.wait, 30)

    asyncio.run(run())


def test_leaving_the_block_cancels(server: ScriptedServer) -> None:
    """A client that leaves a generation early leaves no work on the server."""
    server.script = _endless

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            async with client.generate("text") as generation:
                await anext(generation)
            assert await asyncio.to_thread(server.cancelled.wait, 30)

    asyncio.run(run())


def test_half_an_answer_is_an_error(server: ScriptedServer) -> None:
    """A stream without its final message is never taken for a whole one."""
    server.script = lambda _request, _context: [delta(0, [1], "a")]

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            with pytest.raises(errors.ServerError, match="final message"):
                await client.generate("text").result()

    asyncio.run(run())


def _breaks_once(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """A script whose Generate breaks after a token; a Resume, which has no prompt, returns the rest."""
    if request.HasField("text"):
        yield delta(0, [1], "a")
        fail(context, grpc.StatusCode.UNAVAILABLE, "broken")
    yield delta(1, [2], "b")
    yield finished()


def test_resumable_generations(server: ScriptedServer) -> None:
    """A resumable generation continues after a break; `resume` returns the rest; the server drops cancelled ones."""

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            server.script = _breaks_once
            assert (await client.generate("text", resumable=True, request_id="r").result()).text == "ab"
            assert (await client.resume("r", from_tokens=[1]).result()).text == "b"
            assert [list(request.from_tokens) for request in server.resumed] == [[1], [1]]

            server.script = _endless
            async with client.generate("text", resumable=True, request_id="left") as generation:
                await anext(generation)
            assert await asyncio.to_thread(server.dropped.get, timeout=30) == "left"
            await client.cancel("named")
            assert await asyncio.to_thread(server.dropped.get, timeout=30) == "named"

    asyncio.run(run())


def test_a_cancelled_generation_does_not_try_again(server: ScriptedServer) -> None:
    """`cancel` ends the wait before the next attempt at once."""

    def unreachable(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        fail(context, grpc.StatusCode.UNAVAILABLE, "broken")
        yield finished()

    server.script = unreachable

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            generation = client.generate("text", resumable=True)
            reading = asyncio.create_task(generation.result())
            assert await asyncio.to_thread(server.asked.acquire, timeout=30)
            generation.cancel()
            with pytest.raises((errors.UnavailableError, errors.CancelledError)):
                await reading

    asyncio.run(run())


def test_a_batch(server: ScriptedServer) -> None:
    """Each request has a result; a request that cannot be sent fails alone."""
    server.script = lambda request, _context: [delta(0, [1], request.text.upper()), finished()]

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            answers = [answer async for answer in client.generate_batch(["a", "b"])]
            texts = {answer.index: answer.completion.text for answer in answers if answer.completion is not None}
            assert texts == {0: "A", 1: "B"}
            (failed,) = [answer async for answer in client.generate_batch(["a"], max_tokens=-1)]
            assert str(failed.error) == "stop.max_tokens: -1 is out of range"

    asyncio.run(run())


def test_unary_calls_return_the_answers_of_the_server(server: ScriptedServer) -> None:
    """Tokenize, detokenize and get_model give the blocking client's values."""

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            assert await client.tokenize("ab") == Tokenized((97, 98), 512)
            assert await client.detokenize([104, 105]) == "hi"
            assert (await client.get_model()).vocab_size == 300

    asyncio.run(run())
