"""Many requests on one call, through a real channel and the Python client."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from quire import AsyncClient, BatchAnswer, FinishReason, errors
from quire.v1 import generation_pb2 as v1
from services.access.shares import Turns
from services.calls.context import Caller
from services.calls.generation import Generator
from services.grpc import batch
from services.grpc.batch import Batch
from tests.services.stack import PATIENCE_S, TestCore, running_stack, tokens_request
from tests.services.tokenizers_for_tests import byte_level

FOX = byte_level().encode("the fox ", add_special_tokens=False).ids


def test_every_request_is_answered_under_its_key(tmp_path: Path) -> None:
    """Valid requests get the same as from `Generate`, invalid ones their error; none affects another."""

    async def main() -> list[BatchAnswer]:
        async with running_stack(tmp_path) as stack, AsyncClient(stack.target) as client:
            requests: list[dict[str, object]] = [
                {"token_ids": FOX, "max_tokens": 5},
                {"prompt": ""},
                {"token_ids": FOX, "n": 2, "stop": "fox", "max_tokens": 20},
                {"prompt": "the fox", "temperature": 1000.0},
                *[dict[str, object](token_ids=FOX[:2])] * 40,
            ]
            return [answer async for answer in client.generate_batch(requests, max_tokens=7)]

    answers = {answer.index: answer for answer in asyncio.run(main())}

    assert sorted(answers) == list(range(44))
    first = answers[0].completion
    assert first is not None
    assert first.token_ids == tuple((FOX * 5)[:5])
    assert first.finished.reason is FinishReason.LENGTH
    several = answers[2].completion
    assert several is not None
    assert [choice.text for choice in several.choices] == ["the ", "the "]
    for index, field in ((1, "text"), (3, "sampling.temperature")):
        error = answers[index].error
        assert isinstance(error, errors.InvalidRequestError)
        assert [violation.field for violation in error.violations] == [field]
    for index in range(4, 44):
        completion = answers[index].completion
        assert completion is not None
        assert len(completion.token_ids) == 7


def test_one_request_can_be_cancelled(tmp_path: Path) -> None:
    """It ends CANCELLED, the core hears of it, and the others go on."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda address: TestCore(address, limit=30)) as stack:
            call = stack.generation.GenerateBatch()
            for key in (7, 8):
                request = tokens_request(*FOX, max_tokens=4000 if key == 7 else 20)
                await call.write(v1.GenerateBatchRequest(key=key, request=request))
            await call.write(v1.GenerateBatchRequest(key=7, cancel=True))
            await call.done_writing()
            ends = {}
            async for response in call:
                if response.HasField("error"):
                    ends[response.key] = response.error.code
                elif response.response.HasField("finished"):
                    ends[response.key] = "OK"

            assert ends == {7: "CANCELLED", 8: "OK"}

    asyncio.run(main())


def test_leaving_cancels_what_is_left(tmp_path: Path) -> None:
    """A disconnecting client ends its requests; a malformed message ends the call with its field."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda address: TestCore(address, limit=30)) as stack:
            call = stack.generation.GenerateBatch()
            for key in range(3):
                await call.write(v1.GenerateBatchRequest(key=key, request=tokens_request(*FOX, max_tokens=4000)))
            await call.read()
            await stack.core.saw(lambda core: len(core.submissions) == 3)
            call.cancel()
            await stack.core.saw(lambda core: sum(map(len, core.cancelled)) == 3 * 4)

            for wrong, field in (
                (v1.GenerateBatchRequest(key=1), "action"),
                (v1.GenerateBatchRequest(key=2, request=tokens_request(*FOX, max_tokens=4000)), "key"),
            ):
                call = stack.generation.GenerateBatch()
                await call.write(wrong)
                await call.write(wrong)
                with pytest.raises(aio.AioRpcError, match=field) as error:
                    async for _ in call:
                        pass
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            async with asyncio.timeout(PATIENCE_S):
                await stack.core.saw(lambda core: sum(map(len, core.cancelled)) == 4 * 4)

    asyncio.run(main())


def test_a_call_runs_so_many_requests_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones wait unread, and are answered in the end."""
    monkeypatch.setattr(batch, "MAX_IN_PROGRESS", 3)
    most = 0

    async def main() -> None:
        async with running_stack(tmp_path) as stack, AsyncClient(stack.target) as client:

            async def watched() -> AsyncIterator[BatchAnswer]:
                nonlocal most
                async for answer in client.generate_batch([{"token_ids": FOX}] * 20, max_tokens=4):
                    most = max(most, int(stack.core.reported("quire_live_streams")))
                    yield answer

            assert len([answer async for answer in watched() if answer.error is None]) == 20

    asyncio.run(main())
    assert most <= 3


def test_a_write_after_the_end_of_its_call_fails_silently() -> None:
    """A call that is cancelled while it writes, and whose write then fails, leaves nothing for the log."""

    class OneDelta:
        """Sends one message for any request."""

        async def run(
            self, _request: object, _caller: object, send: Callable[[v1.GenerateResponse], Awaitable[None]]
        ) -> None:
            await send(v1.GenerateResponse())

    async def main() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        began, gone = asyncio.Event(), asyncio.Event()

        async def write(_: v1.GenerateBatchResponse) -> None:
            began.set()
            await gone.wait()
            raise ConnectionError("the client is gone")

        async def requests() -> AsyncIterator[v1.GenerateBatchRequest]:
            yield v1.GenerateBatchRequest(key=1, request=tokens_request(*FOX))
            await asyncio.Event().wait()

        call = asyncio.create_task(
            Batch(cast(Generator, OneDelta()), lambda: cast(Caller, None), write, Turns()).run(requests())
        )
        await began.wait()
        call.cancel()
        await asyncio.sleep(0)
        gone.set()
        await asyncio.wait([call])
        gc.collect()
        return complaints

    assert asyncio.run(main()) == []
