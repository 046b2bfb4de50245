"""On SIGTERM under load, every process finishes or hands over its requests and exits with 0."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checks.chaos.campaign import PATIENCE_S
from checks.chaos.load import Load, check
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient
from quire.errors import QuireError

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_every_kind_of_process_ends_in_order_under_load(tmp_path: Path) -> None:
    """After SIGTERM under load, every kind of process exits with 0 and every resumable stream completes.

    The front end's grace period is shorter than the streams. Its health is NOT_SERVING before it exits. The log reports
    worker and front end as left, not as lost.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)

    async def tell_all(served: Served, load: Load) -> None:
        for number, role in enumerate(("worker", "scheduler", "frontend"), 1):
            await _all_get_on(load)
            async with aio.insecure_channel(served.grpc) as channel:
                health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                while (await health.read()).status != SERVING:
                    pass
                # Request the message before the call ends, because a grpc.aio client that asks later gets none.
                change = asyncio.create_task(health.read())
                await asyncio.sleep(0)
                os.kill(served.children(role)[0].pid, signal.SIGTERM)
                if role == "frontend":
                    assert (await change).status == NOT_SERVING
                change.cancel()
            await _until(lambda: len(_deaths(served)) == number)  # noqa: B023
            if role == "scheduler":
                # Streams may still get tokens from the old scheduler. Only a scheduler that the front end has joined
                # can be seen leaving.
                await _until(lambda: served.count_logged("front end joined") >= 2)
        await _all_get_on(load)

    with serve(checkpoint, "--dtype=float32", "--workers=2", "--grace-period-s=1") as served:
        load = Load(served.grpc, 8, oracle.vocab_size, 900, 1, longest_prompt=20, resumable=True, connections=4)
        load.constrained_share = 0.0

        async def run() -> None:
            streaming = asyncio.create_task(load.run())
            await asyncio.wait_for(load.flows.wait(), PATIENCE_S)
            try:
                await tell_all(served, load)
            finally:
                load.stop()
                await streaming

        asyncio.run(run())
        served.wait_until_empty()
        assert _deaths(served) == [
            ("worker-0", "exit code 0"), ("scheduler", "exit code 0"), ("frontend-0", "exit code 0")
        ]  # fmt: skip
        # If the machine stalls for longer than the heartbeat timeout, a process that did not get SIGTERM may be
        # reported as lost.
        left = [line["event"] for line in served.log_lines() if line["event"].endswith(" left")]
        assert left == ["worker left", "front end left"]
    tally = Tally()
    for streamed in load.done:
        check(oracle, streamed, tally)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("outlast", [False, True], ids=["streams that end in time", "streams that outlast it"])
def test_a_service_that_shuts_down_finishes_short_streams(tmp_path: Path, outlast: bool) -> None:
    """Streams shorter than the grace period complete; longer ones get an error which says that the service is gone.

    The service exits 0 and leaves no process behind.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")

    async def run(served: Served) -> list[int | str]:
        async with AsyncClient(served.grpc) as client:
            tokens = 1000 if outlast else 200
            streams = [client.generate("the", max_tokens=tokens, ignore_eos=True) for _ in range(6)]
            for stream in streams:
                await anext(stream)
            served.process.terminate()
            results = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        outcomes: list[int | str] = []
        for result in results:
            if isinstance(result, QuireError):
                outcomes.append(result.code)
            else:
                assert not isinstance(result, BaseException), result
                assert result.finished is not None
                outcomes.append(result.finished.usage.completion_tokens)
        return outcomes

    with serve(checkpoint, f"--grace-period-s={0.2 if outlast else 60}", "--max-model-len=1024", end=False) as served:
        outcomes = asyncio.run(run(served))
        assert served.wait() == 0
    assert outcomes == ["UNAVAILABLE" if outlast else 200] * 6


async def _all_get_on(load: Load) -> None:
    """Waits until every stream has got something since now, or is over."""
    before = {request_id: len(streamed.tokens) for request_id, streamed in load.live.items()}
    await _until(lambda: all(len(s.tokens) > before.get(s.request_id, -1) for s in load.live.values()))


async def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it does not come about"
        await asyncio.sleep(0.02)


def _deaths(served: Served) -> list[tuple[str, str]]:
    return [(line["process"], line["how"]) for line in served.log_lines() if line["event"] == "process died"]
