"""`quire serve --tensor-parallel-size 2`: two ranks serve as one worker, and a lost rank is a lost worker."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from quire import AsyncClient, Client
from tests.checkpoints import make_checkpoint
from tests.e2e.harness import QUIRE, Served, serve
from tests.e2e.load import Answer, draw_prompts
from tests.e2e.oracle import Oracle, Tally
from tests.e2e.test_worker_death import _stream


def followers(served: Served) -> list[psutil.Process]:
    """The processes that workers have started."""
    return [child for worker in served.children("worker") for child in worker.children()]


def test_two_ranks_serve_and_survive_as_one_worker(tmp_path: Path) -> None:
    """Tokens are the oracle's; `kill -9` of a follower while streaming is a pause; nothing is left at the end."""
    checkpoint = make_checkpoint("Qwen2ForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    answers = [Answer(prompt, 300) for prompt in draw_prompts([3, 30, 100], oracle.vocab_size, seed=2)]
    with serve(checkpoint, "--dtype=float32", "--num-threads=1", "--tensor-parallel-size=2") as served:
        listed = subprocess.run(
            [*QUIRE, "workers", "--target", served.grpc], capture_output=True, text=True, check=True
        )
        (before,) = followers(served)
        asyncio.run(_run_with_a_kill(served, answers, before.pid))
        (after,) = followers(served)
        with Client(served.grpc) as client:
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            shaped = client.generate("x", json_schema=schema, max_tokens=40, temperature=1.0, seed=1).result()

    assert "2 ranks, cpu" in listed.stdout
    assert after.pid != before.pid
    assert '"a"' in shaped.text
    tally = Tally()
    for answer in answers:
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
        assert answer.finished is not None
        assert answer.finished.usage.preemptions == 1
    assert tally.near_ties * 1000 < tally.tokens, tally


async def _run_with_a_kill(served: Served, answers: list[Answer], pid: int) -> None:
    flowing = asyncio.Semaphore(0)
    async with AsyncClient(served.grpc) as client:
        streams = [asyncio.create_task(_stream(client, answer, flowing)) for answer in answers]
        for _ in answers:
            await flowing.acquire()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*streams)


@pytest.mark.parametrize(
    ("architecture", "size", "reason"),
    [
        ("LlamaForCausalLM", "3", "tensor_parallel_size: 3 does not divide the model's 4 query heads; give a divisor"),
        ("GPT2LMHeadModel", "2", "tensor_parallel_size: 2 is not supported for GPT2LMHeadModel; use 1"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(architecture: str, size: str, reason: str, tmp_path: Path) -> None:
    """The command ends with one line that names the setting, and leaves no file of the ranks."""
    checkpoint = make_checkpoint(architecture, tmp_path)
    command = [*QUIRE, "worker", "--model", str(checkpoint), "--tensor-parallel-size", size, "--device", "cpu"]
    left = tmp_path / "left"
    left.mkdir()
    environment = os.environ | {"TMPDIR": str(left)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)

    assert done.returncode == 1
    assert list(left.glob("quire-ranks-*")) == []
    assert f"quire worker: {reason}" in done.stderr.splitlines()
