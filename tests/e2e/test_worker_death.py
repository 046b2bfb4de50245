"""What clients see when a worker is killed: a pause."""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient
from quire.errors import QuireError
from tests.e2e.load import Answer, draw_prompts

WAIT_S = 3.0


@dataclass(slots=True)
class Kill:
    """The death of a worker."""

    time: float = 0.0
    """When, by the monotonic clock."""


def test_streams_continue_after_kill_9(tmp_path: Path) -> None:
    """`kill -9` of the worker while streaming: each stream goes on without gap or repeat when a worker is back."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    answers = [Answer(prompt, 400) for prompt in draw_prompts([3, 30, 100, 200], oracle.vocab_size, seed=2)]
    with serve(checkpoint, "--dtype=float32", "--num-threads=1") as served:
        asyncio.run(_run_with_a_kill(served, answers, Kill()))
        assert served.metric("quire_kv_blocks", state="held") == 0
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == 400
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
        assert answer.finished is not None
        assert answer.finished.usage.preemptions == 1
    assert tally.near_ties * 1000 < tally.tokens, tally


@pytest.mark.every(3)
def test_unavailable_comes_only_after_the_configured_wait(tmp_path: Path) -> None:
    """Without a new worker, streams end UNAVAILABLE, but not before `worker_wait_s` has passed.

    Their generated tokens are delivered. The scheduler's log reports both events, by worker and by request.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    (prompt,) = draw_prompts([5], 256)
    with serve(checkpoint, "--num-threads=1", f"--worker-wait-s={WAIT_S}", end=False) as served:
        answer = Answer(prompt, 900)
        # This worker cannot restart, because its model was deleted.
        (checkpoint / "config.json").rename(checkpoint / "gone.json")
        kill = Kill()
        with pytest.raises(QuireError) as caught:
            asyncio.run(_run_with_a_kill(served, [answer], kill))
        waited = time.monotonic() - kill.time
        assert waited >= WAIT_S, "the configured wait was cut short"
        assert caught.value.code == "UNAVAILABLE"
        assert caught.value.reason == "NO_WORKER"
        assert answer.tokens
        served.process.terminate()
        served.wait()
        lines = served.log_lines()
    (failed,) = (line for line in lines if line["event"] == "request failed")
    (lost,) = (line for line in lines if line["event"] == "worker lost")
    assert (failed["service"], failed["reason"]) == ("quire-scheduler", "no_worker")
    assert failed["request_id"].startswith("req-")
    assert lost["epoch"] == next(line["epoch"] for line in lines if line["event"] == "worker joined")


async def _run_with_a_kill(served: Served, answers: list[Answer], kill: Kill) -> None:
    """Streams all; kills the worker as soon as every stream has had 20 tokens."""
    flowing = asyncio.Semaphore(0)
    async with AsyncClient(served.grpc) as client:
        streams = [asyncio.create_task(_stream(client, answer, flowing)) for answer in answers]
        for _ in answers:
            await flowing.acquire()
        worker = served.pid("worker")
        kill.time = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        await asyncio.gather(*streams)


async def _stream(client: AsyncClient, answer: Answer, flowing: asyncio.Semaphore) -> None:
    stream = client.generate(
        token_ids=answer.prompt, max_tokens=answer.max_tokens, temperature=0, ignore_eos=True, timeout=240
    )
    flows = False
    async for delta in stream:
        assert delta.first_index == len(answer.tokens), "a gap or a repeat"
        answer.tokens.extend(delta.token_ids)
        if not flows and len(answer.tokens) >= 20:
            flows = True
            flowing.release()
    answer.finished = stream.finished
