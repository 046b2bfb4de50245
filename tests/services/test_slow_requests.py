"""gRPC requests that arrive slowly: a client may send the messages of few calls slowly, and none for long."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.access import shares
from services.grpc import boundary
from tests.services.stack import PATIENCE_S, Stack, running_stack, tokens_request

GENERATE = "/quire.v1.GenerationService/Generate"
METHODS = (
    GENERATE,
    "/quire.v1.GenerationService/GenerateOnce",
    "/quire.admin.v1.AdminService/ListWorkers",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


async def _nothing(until: asyncio.Event) -> AsyncIterator[bytes]:
    await until.wait()
    yield b""


def _begin(stack: Stack, method: str, until: asyncio.Event) -> Any:
    """Begin a call that sends its request only after `until` is set."""
    return _call(stack, method, _nothing(until))


def _call(stack: Stack, method: str, requests: AsyncIterator[bytes]) -> Any:
    channel: Any = stack.channel
    return channel.stream_stream(method)(requests)


async def _until_held(stack: Stack, count: int) -> None:
    """Wait until so many requests count as slow."""
    line = f'quire_share_held{{frontend="frontend-0",resource="slow requests"}} {count}.0'
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await stack.http.get("/metrics")).text:
            pass


def test_few_requests_may_arrive_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are refused, because gRPC reserves memory for each of them. Other requests are served."""
    monkeypatch.setattr(boundary, "_FAST_S", 0.05)
    monkeypatch.setattr(shares, "_MAX_SLOW_REQUESTS", 5)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            until = asyncio.Event()
            slow = [_begin(stack, METHODS[number % len(METHODS)], until) for number in range(3)]
            await _until_held(stack, 3)

            for method in METHODS:
                more = _begin(stack, method, until)
                assert await more.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert (await more.details()).startswith("slow requests: your share of the limit of 5 is in use")
            _, finished = await stack.generate(tokens_request(5, max_tokens=3))
            assert finished.usage.completion_tokens == 3

            for call in slow:
                call.cancel()
            await _until_held(stack, 0)

    asyncio.run(main())


@pytest.mark.parametrize("method", METHODS)
def test_a_request_that_does_not_arrive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The error says what to do, and nothing is held after it."""
    monkeypatch.setattr(boundary, "_FAST_S", 0.05)
    monkeypatch.setattr(boundary, "_RECEIVE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            call = _begin(stack, method, asyncio.Event())

            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "request: not complete after 0.05 s; send it without pauses"
            await _until_held(stack, 0)

    asyncio.run(main())


def test_a_slow_request_is_served_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call is counted from then on; a call that ends without a request is refused."""
    monkeypatch.setattr(boundary, "_FAST_S", 0.05)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            complete = asyncio.Event()

            async def slowly() -> AsyncIterator[bytes]:
                await complete.wait()
                yield tokens_request(5, max_tokens=3).SerializeToString()

            async def never() -> AsyncIterator[bytes]:
                nothing: tuple[bytes, ...] = ()
                for each in nothing:
                    yield each

            call = _call(stack, GENERATE, slowly())
            await _until_held(stack, 1)
            complete.set()
            assert [each async for each in call]
            assert await call.code() == grpc.StatusCode.OK
            empty = _call(stack, GENERATE, never())
            assert await empty.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert await empty.details() == "request: missing; send one message"

    asyncio.run(main())


def test_callers_without_credentials_are_refused_before_their_request_arrives(tmp_path: Path) -> None:
    """They need not send it."""
    principals = tmp_path / "principals.toml"
    principals.write_text("[principals.a]\n")

    async def main() -> None:
        async with running_stack(tmp_path, principals=str(principals)) as stack:
            call = _begin(stack, GENERATE, asyncio.Event())

            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())
