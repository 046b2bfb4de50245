"""Memory of finished calls."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.access.shares import SMALL_REQUEST_BYTES
from tests.services.stack import PATIENCE_S, Stack, running_stack, tokens_request

CHAT = "/v1/chat/completions"
TURN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {**TURN, "max_tokens": 4000}

Call = Callable[[Stack], Awaitable[object]]


def _post(status: int, path: str, body: dict[str, Any], **headers: str) -> Call:
    async def call(stack: Stack) -> None:
        response = await stack.http.post(path, json=body, headers=headers)
        assert response.status_code == status

    return call


async def _leave(stack: Stack) -> None:
    before = len(stack.core.cancelled)
    async with (
        httpx.AsyncClient(base_url=stack.http.base_url) as client,
        client.stream("POST", CHAT, json={**LONG, "stream": True}) as response,
    ):
        await anext(response.aiter_bytes())
    await stack.core.saw(lambda core: len(core.cancelled) > before)


async def _until_ended(known: set[asyncio.Task[Any]]) -> None:
    if new := asyncio.all_tasks() - known:
        await asyncio.wait(new, timeout=PATIENCE_S)


async def _generate(stack: Stack) -> None:
    await stack.generate(tokens_request(5, 6))


async def _refused(stack: Stack) -> None:
    with pytest.raises(grpc.RpcError):
        await stack.generate(tokens_request(5, max_tokens=1_000_000))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(_post(200, CHAT, {**TURN, "n": 2}), id="whole"),
        pytest.param(_post(200, CHAT, {**TURN, "stream": True}), id="stream"),
        pytest.param(_post(200, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4}), id="prompts"),
        pytest.param(_post(400, CHAT, {**TURN, "stop": [1]}), id="invalid"),
        pytest.param(_post(400, CHAT, {**TURN, "stop": [1] * SMALL_REQUEST_BYTES}), id="invalid-large"),
        pytest.param(_post(400, "/v1/completions", {"prompt": [5] * 9000}), id="too-long"),
        pytest.param(_post(404, CHAT, {**TURN, "model": "unknown"}), id="unknown-model"),
        pytest.param(_post(504, CHAT, LONG, **{"X-Request-Timeout": "0.01"}), id="deadline"),
        pytest.param(_leave, id="client-left"),
        pytest.param(_generate, id="grpc"),
        pytest.param(_refused, id="grpc-invalid"),
    ],
)
def test_a_finished_call_leaves_no_garbage(tmp_path: Path, call: Call) -> None:
    """Bodies, prompts and streams are freed when a call ends. In a cycle, they would wait for a collection.

    A parsed body may have a hundred megabytes, and the front end collects rarely.
    """

    async def main() -> set[str]:
        async with running_stack(tmp_path) as stack:
            await call(stack)  # The first call fills caches.
            tasks = asyncio.all_tasks()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await call(stack)
                await _until_ended(tasks)
                gc.collect()
                types = {type(each) for each in gc.garbage}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
        return {f"{each.__module__}.{each.__qualname__}" for each in types}

    found = asyncio.run(main())

    # gRPC keeps a reference to the stack frame of a refused call. Only the error is left in this frame.
    ours = {name for name in found if name.startswith(("services.", "shared.", "protos."))}
    assert {name for name in ours if not name.startswith("shared.errors.")} == set()
