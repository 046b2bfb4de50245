"""Large gRPC requests, which take the event loop as large bodies do."""

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.access import shares
from services.access.shares import SMALL_REQUEST_BYTES, Turns
from services.calls.embeddings import _violations
from services.text.chat import MAX_JSON_VALUES, check_chat
from tests.services.stack import running_stack, tokens_request


def test_a_place_for_blocking_work_is_free_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause begins when the task that works next waits. Meanwhile, other tasks run; another principal is next."""
    monkeypatch.setattr(shares, "_PAUSE", 0.0)

    async def main() -> list[str]:
        turns, order = Turns(), []

        async def work(principal: str) -> None:
            await turns.begin_work(principal)
            order.append(f"{principal} begins")
            order.append(f"{principal} waits")
            await asyncio.sleep(0)

        await asyncio.gather(work("greedy"), work("greedy"), work("modest"))
        return order

    order = asyncio.run(main())

    assert order == [f"{name} {act}" for name in ("greedy", "greedy", "modest") for act in ("begins", "waits")]


def test_large_requests_wait_for_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large request waits during the pause after another one, for every kind of call; a small one does not."""
    monkeypatch.setattr(shares, "_PAUSE", 1e9)
    large = tokens_request(*[5] * SMALL_REQUEST_BYTES)
    wrong = v1.GenerateBatchRequest(key=1, request=large)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:

            async def refused() -> None:
                with pytest.raises(grpc.RpcError):
                    await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=large))

            await refused()  # The prompt is too long for the model. The pause that follows does not end.
            second = asyncio.create_task(refused())
            batch = stack.generation.GenerateBatch()
            await batch.write(wrong)
            await batch.write(v1.GenerateBatchRequest(key=2, request=tokens_request(5, max_tokens=1)))
            answered = set()
            while response := await batch.read():
                assert isinstance(response, v1.GenerateBatchResponse)
                answered.add(response.key)
                if response.response.HasField("finished"):
                    break
            small = v1.GenerateOnceRequest(request=tokens_request(5, max_tokens=1))
            assert len((await stack.generation.GenerateOnce(small)).choices) == 1
            assert (answered, second.done()) == ({2}, False)
            batch.cancel()
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    asyncio.run(main())


def test_the_json_of_a_conversation_is_bounded_before_it_is_read() -> None:
    """The values in all tool calls count together, including those within argument texts."""
    calls = "[" + ",".join(["{}"] * (MAX_JSON_VALUES // 8)) + "]"
    chat = v1.ChatInput(messages=[v1.ChatMessage(role="assistant", tool_calls_json=calls)] * 5)

    (violation,) = check_chat(chat, True)

    assert violation.field == "chat.messages"
    assert violation.description.startswith(
        f"has more than {MAX_JSON_VALUES} values in the JSON of tools and tool calls"
    )
    del chat.messages[3:]
    assert not list(check_chat(chat, True))


def test_the_token_ids_of_a_call_for_embeddings_are_bounded() -> None:
    """The limit of a prompt applies to the sum of all inputs."""
    request = v1.EmbedRequest()
    for _ in range(17):
        request.inputs.add().token_ids.ids.extend([1] * (1 << 16))

    (violation,) = _violations(request, link_pb2.ServedModel(vocab_size=9))

    assert (violation.field, violation.description.partition(" (")[0]) == ("inputs", "too many token ids")
