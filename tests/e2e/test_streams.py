"""Many concurrent streams through real gRPC; half of the clients leave."""

import asyncio
from pathlib import Path

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import MAX_POSITIONS, make_checkpoint
from measure.testbed.service import serve
from quire import AsyncClient
from quire.errors import CancelledError
from tests.e2e.load import Answer, draw_prompts, generate

STREAMS = 64


def test_64_streams_finish_and_cancelled_ones_leave_nothing(tmp_path: Path) -> None:
    """64 concurrent streams deliver the oracle's tokens, also when half of them are cancelled.

    Afterwards every block is free or cached.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prompts = draw_prompts([5 + 3 * index for index in range(STREAMS)], oracle.vocab_size, seed=1)
    with serve(checkpoint, "--dtype=float32", "--num-threads=1", "--max-num-seqs=32") as served:
        answers = [Answer(prompt, 40) for prompt in prompts]
        asyncio.run(_run_all(served.grpc, answers))
        tally = Tally()
        for answer in answers:
            assert len(answer.tokens) == 40
            oracle.check_greedy(answer.prompt, answer.tokens, tally)
        served.wait_until_empty(length=STREAMS)

        survivors = asyncio.run(_run_cancelling_half(served.grpc, [Answer(prompt, 60) for prompt in prompts]))
        for answer in survivors:
            assert len(answer.tokens) == 60
            oracle.check_greedy(answer.prompt, answer.tokens, tally)
        assert tally.near_ties * 1000 < tally.tokens, tally
        served.wait_until_empty(length=STREAMS + STREAMS // 2, cancelled=STREAMS // 2)


async def _run_all(target: str, answers: list[Answer]) -> None:
    async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(generate(client, answer))


async def _run_cancelling_half(target: str, answers: list[Answer]) -> list[Answer]:
    async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        for index, answer in enumerate(answers):
            tasks.create_task(generate(client, answer) if index % 2 else _cancel_midway(client, answer))
    return answers[1::2]


async def _cancel_midway(client: AsyncClient, answer: Answer) -> None:
    # Fill the context, because the server runs ahead of a slow reader and must not finish before it gets the
    # cancellation.
    room = MAX_POSITIONS - len(answer.prompt)
    stream = client.generate(token_ids=answer.prompt, max_tokens=room, temperature=0, ignore_eos=True)
    seen = 0

    async def read() -> None:
        nonlocal seen
        async for delta in stream:
            seen += len(delta.token_ids)
            if seen >= 10:
                stream.cancel()

    with pytest.raises(CancelledError):
        await read()
