"""When front ends and the scheduler die, one by one or all at once, clients of resumable requests only see pauses."""

import asyncio
import os
import signal
import socket
from pathlib import Path

from checks.chaos.fronts import Campaign, Kill, run
from measure.testbed.service import Served, serve
from quire import AsyncClient
from quire.aio import AsyncGeneration

OPTIONS = {"max_tokens": 300, "temperature": 1.0, "ignore_eos": True, "logprobs": 1}


def test_kills_of_every_kind_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """After every kind of kill, each resumable stream completes with the reference's tokens.

    One front end, all front ends, the scheduler, and scheduler and front ends at once are killed under load.
    """
    outcome = run(Campaign(num_streams=12, kills_of_each_kind=1, max_tokens=150, fsync="step", pause_s=0.3), tmp_path)

    print(outcome.figures())
    assert len(outcome.kills) == len(Kill)
    assert all(record.live for _, record in outcome.kills)


def test_a_standby_takes_over_under_load(tmp_path: Path) -> None:
    """After each kill of the leader, the other scheduler continues each stream with the reference's tokens."""
    campaign = Campaign(
        num_streams=12, kills_of_each_kind=3, max_tokens=150, standby=True, kinds=(Kill.SCHEDULER,), pause_s=0.3
    )
    outcome = run(campaign, tmp_path)

    print(outcome.figures())
    assert len(outcome.kills) == 3
    assert all(record.live for _, record in outcome.kills)


def test_a_service_that_is_killed_altogether_goes_on_where_it_was(tmp_path: Path) -> None:
    """After all processes die and start again, waiting clients get exactly the tokens of an undisturbed run.

    The service starts on the same ports. No token is missing or repeated, and each has its log-probability.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (f"--journal={tmp_path}", f"--grpc-port={port}", "--dtype=float32")

    async def read(stream: AsyncGeneration, flows: asyncio.Event) -> list[int]:
        tokens: list[int] = []
        async for delta in stream:
            assert delta.first_index == len(tokens), "a gap or a repeat"
            assert [each.token.token_id for each in delta.logprobs] == list(delta.token_ids)
            tokens += delta.token_ids
            flows.set()
        return tokens

    async def answers(served: Served) -> list["asyncio.Task[list[int]]"]:
        client = AsyncClient(served.grpc)
        flows = [asyncio.Event() for _ in range(4)]
        tasks = []
        for seed, flowing in enumerate(flows):
            stream = client.generate("Once upon a time", seed=seed, resumable=True, **OPTIONS)  # type: ignore[arg-type]
            tasks.append(asyncio.create_task(read(stream, flowing)))
        for flowing in flows:
            await flowing.wait()
        return tasks

    async def go() -> tuple[list[list[int]], list[list[int]]]:
        with serve("demo", *flags, end=False) as served:
            calm = await asyncio.gather(*await answers(served))
            tasks = await answers(served)
            assert not all(task.done() for task in tasks)
            os.kill(served.process.pid, signal.SIGKILL)
            await asyncio.to_thread(served.wait)
        with serve("demo", *flags):
            return calm, await asyncio.gather(*tasks)

    calm, resumed = asyncio.run(go())

    assert [len(tokens) for tokens in resumed] == [300] * 4
    assert resumed == calm
