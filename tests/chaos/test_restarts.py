"""When parts of a service are replaced during operation, in order or not, clients see at most pauses."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checks.chaos.load import Load, Streamed, check
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient, SchedulingOptions
from quire.errors import QueueFullError, QuireError, UnavailableError

PATIENCE_S = 120.0
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """A service with two workers and two front ends, and its model's expected output."""

    served: Served
    oracle: Oracle


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Yield a service for all tests of this file."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    with serve(checkpoint, "--dtype=float32", "--workers=2", "--frontends=2") as served:
        yield Stage(served, Oracle(checkpoint))


def test_every_worker_is_restarted_under_load(stage: Stage) -> None:
    """When workers are restarted one after the other, all exit 0, no stream fails, and no token is lost or repeated."""

    async def restart_all(served: Served) -> None:
        for number, worker in enumerate(served.children("worker"), 1):
            os.kill(worker.pid, signal.SIGTERM)
            await _until(lambda: served.count_logged("worker joined") == 2 + number)  # noqa: B023

    _under_load(stage, restart_all)

    lines = stage.served.log_lines()
    assert [line["how"] for line in lines if line["event"] == "process died"] == ["exit code 0"] * 2
    assert [line["level"] for line in lines if line["event"] == "worker left"] == ["info"] * 2
    assert not any(line["event"] == "worker lost" for line in lines)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_the_scheduler_comes_back_under_load(stage: Stage, number: signal.Signals) -> None:
    """After the scheduler dies or is replaced, every stream continues with the token after the last delivered one."""

    async def restart(served: Served) -> None:
        joined = served.count_logged("worker joined")
        os.kill(served.pid("scheduler"), number)
        await _until(lambda: served.count_logged("worker joined") >= joined + 2)
        await _until(lambda: served.metric("vllm:num_requests_running") > 0)

    _under_load(stage, restart)


def test_a_restart_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    """When the scheduler is killed, the next one completes every accepted stream with the model's tokens.

    The queue is full, and a tenant is at its limits. Some requests have delivered tokens, and others still wait.
    """
    # The streams are long, so that none ends while the queue fills.
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model", max_position_embeddings=2048)
    oracle, limits = Oracle(checkpoint), tmp_path / "admission.toml"
    limits.write_text("[tenants.small]\nmax_running = 1\nmax_queued = 2\n", encoding="utf-8")
    flags = ("--dtype=float32", "--max-num-seqs=3", "--max-queued-requests=6", f"--admission-file={limits}")
    with serve(checkpoint, *flags) as served:
        streams = asyncio.run(_restart_with_a_full_queue(served))
        served.wait_until_empty()
    tally = Tally()
    for streamed in streams:
        assert streamed.error is None
        assert len(streamed.tokens) == streamed.max_tokens
        oracle.check_greedy(streamed.prompt, streamed.tokens, tally)


async def _restart_with_a_full_queue(served: Served) -> list[Streamed]:
    """Kill the scheduler while three streams run and six wait; return all nine after they have ended.

    One running and two waiting streams belong to a tenant that may have no more.
    """
    streams = [Streamed(f"r{number}", [20 + number, 30], 2000, None) for number in range(9)]

    async def one(client: AsyncClient, streamed: Streamed, tenant: str) -> None:
        options = SchedulingOptions(tenant=tenant)
        generation = client.generate(
            token_ids=streamed.prompt,
            max_tokens=streamed.max_tokens,
            temperature=0,
            ignore_eos=True,
            scheduling=options,
        )
        try:
            async for delta in generation:
                assert delta.first_index == len(streamed.tokens), f"{streamed.request_id}: a gap or a repeat"
                streamed.tokens.extend(delta.token_ids)
        except QuireError as error:
            streamed.error = error

    def counts(running: int, waiting: int) -> bool:
        found = served.metric("vllm:num_requests_running"), served.metric("vllm:num_requests_waiting")
        return found == (running, waiting)

    async with AsyncClient(served.grpc) as client, asyncio.TaskGroup() as tasks:
        for number, streamed in enumerate(streams):
            tasks.create_task(one(client, streamed, "small" if number in (0, 3, 4) else "large"))
            await _until(lambda: counts(min(number, 2) + 1, max(number - 2, 0)))  # noqa: B023
        with pytest.raises(QueueFullError):
            await client.generate("the", max_tokens=4).result()
        os.kill(served.pid("scheduler"), signal.SIGKILL)
    return streams


def test_a_blocked_scheduler_removes_no_worker(stage: Stage) -> None:
    """A scheduler that was blocked for two seconds does not count its workers' silence."""

    async def stall(served: Served) -> None:
        pid = served.pid("scheduler")
        before = len(_lost(served))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.0)
        os.kill(pid, signal.SIGCONT)
        tokens = served.metric("vllm:generation_tokens_total")
        await _until(lambda: served.metric("vllm:generation_tokens_total") > tokens)
        assert _lost(served)[before:] in ([], ["its connection was closed"])

    _under_load(stage, stall)


def _lost(served: Served) -> list[str]:
    """Why workers were given up so far."""
    return [line["reason"] for line in served.log_lines() if line["event"] == "worker lost"]


def test_a_dead_front_end_takes_only_its_own_streams(stage: Stage) -> None:
    """Streams of a killed front end end with UNAVAILABLE at once; streams of the other front end continue.

    A new front end replaces the killed one.
    """

    async def run(served: Served) -> tuple[list[int], int]:
        counts, failed = [], 0
        # The kernel assigns each connection to one of the front ends.
        clients = [AsyncClient(served.grpc) for _ in range(8)]
        streams = [client.generate("the", max_tokens=600, ignore_eos=True, temperature=0.0) for client in clients]
        for stream in streams:
            await anext(stream)
        os.kill(served.children("frontend")[0].pid, signal.SIGKILL)
        for stream in streams:
            try:
                completion = await stream.result()
                assert completion.finished is not None
                counts.append(completion.finished.usage.completion_tokens)
            except UnavailableError:
                failed += 1
        for client in clients:
            await client.close()
        await _until(lambda: served.metric("quire_frontends") == 2)
        return counts, failed

    counts, failed = asyncio.run(run(stage.served))

    assert counts == [600] * (8 - failed)
    stage.served.wait_until_empty()


def _under_load(stage: Stage, act: Callable[[Served], Coroutine[None, None, None]]) -> None:
    """Acts while streams flow, and checks every one of them."""

    async def run() -> Load:
        load = Load(stage.served.grpc, STREAMS, stage.oracle.vocab_size, 120, seed=3)
        streaming = asyncio.create_task(load.run())
        await asyncio.wait_for(load.flows.wait(), PATIENCE_S)
        try:
            await act(stage.served)
        finally:
            load.stop()
            await streaming
        return load

    load = asyncio.run(run())
    tally = Tally()
    for streamed in load.done:
        check(stage.oracle, streamed, tally)
    stage.served.wait_until_empty()


async def _until(condition: Callable[[], bool]) -> None:
    """Waits for an event that only a log or a metric shows."""
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(_holds, condition):
        assert time.monotonic() < end, "it does not come about"
        await asyncio.sleep(0.05)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError:
        return False  # The front end that got the request is gone.
