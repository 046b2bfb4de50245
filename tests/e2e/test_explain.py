"""`quire explain` against a running service: planted causes of slowness are named first, without knowledge of them."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from quire import AsyncClient, SchedulingOptions
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from tests.checkpoints import make_checkpoint
from tests.e2e.harness import DEFAULTS, QUIRE, ROOT, Served, serve

VICTIM = "victim"
_ADMISSION = "[tenants.small]\nmax_running = 1\n"
_FLAGS = ("--policy=priority", "--max-num-seqs=3", "--max-num-batched-tokens=2048", "--resume-keep-s=0")


@dataclass(slots=True)
class Scene:
    """A running service and a client of it."""

    served: Served
    client: AsyncClient
    rng: random.Random

    def prompt(self, length: int) -> list[int]:
        """Draws a prompt that no other request has."""
        return [self.rng.randrange(16, 300) for _ in range(length)]

    async def run(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "",
        pause_s: float = 0.0,
    ) -> None:
        """Runs a request to its end."""
        stream = self.client.generate(
            token_ids=prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            request_id=name,
            scheduling=SchedulingOptions(priority=priority, tenant=tenant),
        )
        async for _ in stream:
            pass

    @contextlib.asynccontextmanager
    async def beside(self, *requests: Awaitable[None]) -> AsyncIterator[None]:
        """Runs requests beside what is in the block; waits for their ends."""
        tasks = [asyncio.ensure_future(request) for request in requests]
        try:
            yield
        finally:
            await asyncio.gather(*tasks)

    async def until(self, metric: str, count: float) -> None:
        """Waits until a metric of the service has at least this value."""
        while await asyncio.to_thread(self.served.metric, metric) < count:
            pass  # every look lets the requests go on


Plant = Callable[[Scene], Awaitable[None]]


async def _tenant_limit(scene: Scene) -> None:
    async with scene.beside(scene.run("long", scene.prompt(8), 400, tenant="small")):
        await scene.until("vllm:num_requests_running", 1)
        await scene.run(VICTIM, scene.prompt(8), 4, tenant="small")


async def _full_queue(scene: Scene) -> None:
    many = [scene.run(f"early-{index}", scene.prompt(8), 120) for index in range(12)]
    async with scene.beside(*many):
        await scene.until("vllm:num_requests_waiting", 9)
        await scene.run(VICTIM, scene.prompt(8), 4)


async def _long_prompts(scene: Scene) -> None:
    """Let the victim decode while prompts pass through the other rows, so that each of its steps has chunks of them."""
    many = [asyncio.ensure_future(scene.run(f"neighbour-{index}", scene.prompt(900), 1)) for index in range(120)]
    async with scene.beside(*many):
        await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        await scene.run(VICTIM, scene.prompt(8), 20, priority=50)


async def _preemption(scene: Scene) -> None:
    async with scene.beside(scene.run(VICTIM, scene.prompt(8), 40, priority=-5)):
        await scene.until("vllm:num_requests_running", 1)
        await asyncio.gather(*(scene.run(f"urgent-{index}", scene.prompt(8), 300, priority=50) for index in range(3)))


async def _slow_worker(scene: Scene) -> None:
    await scene.run("usual", scene.prompt(8), 100)
    worker = scene.served.pid("worker")
    async with scene.beside(scene.run(VICTIM, scene.prompt(8), 60)):
        await scene.until("vllm:num_requests_running", 1)
        for _ in range(20):
            os.kill(worker, signal.SIGSTOP)
            await asyncio.sleep(0.06)
            os.kill(worker, signal.SIGCONT)
            await asyncio.sleep(0.005)


async def _worker_killed(scene: Scene) -> None:
    async with scene.beside(scene.run(VICTIM, scene.prompt(8), 200)):
        await scene.until("vllm:num_requests_running", 1)
        os.kill(scene.served.pid("worker"), signal.SIGKILL)


async def _cold_prefix(scene: Scene) -> None:
    prompt = scene.prompt(960)
    await scene.run("first", prompt, 1)
    os.kill(scene.served.pid("worker"), signal.SIGKILL)
    await scene.run("between", scene.prompt(4), 1)
    await scene.run(VICTIM, prompt, 1)


async def _stalled_reader(scene: Scene) -> None:
    """Read one message, and nothing for a while; gRPC takes in 64 KiB meanwhile, so the messages are large."""
    async with aio.insecure_channel(scene.served.grpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            v1.GenerateRequest(
                token_ids=v1.TokenIds(ids=scene.prompt(8)),
                request_id=VICTIM,
                stop=v1.StopOptions(max_tokens=400, ignore_eos=True),
                output=v1.OutputOptions(logprobs=20),
            )
        )
        await call.read()
        await asyncio.sleep(15)
        while await call.read() is not aio.EOF:
            pass


async def _grammar(scene: Scene) -> None:
    words = ["".join(scene.rng.choices("abcdefghij", k=12)) for _ in range(400)]
    choices = "|".join(words)
    stream = scene.client.generate(
        token_ids=scene.prompt(8), max_tokens=4, request_id=VICTIM, regex=f"(({choices}) ){{1,40}}"
    )
    async for _ in stream:
        pass


_PLANTS: dict[str, tuple[Plant, set[str]]] = {
    "a tenant's limit": (_tenant_limit, {"waiting for its tenant's limit"}),
    "a full queue": (_full_queue, {"waiting for its turn", "waiting for a free row"}),
    "neighbours with long prompts": (_long_prompts, {"other prompts' chunks in its steps"}),
    "preemption by priority": (_preemption, {"preempted"}),
    "a slow worker": (_slow_worker, {"slow worker"}),
    "a stalled reader": (_stalled_reader, {"held out: its reader took no output", "the client's own slowness"}),
    "a killed worker": (_worker_killed, {"worker lost"}),
    "a cold prefix": (_cold_prefix, {"own prefill of a prefix that was known before"}),
}
_SWAPPING: dict[str, tuple[Plant, set[str]]] = {
    "a swap": (_preemption, {"swapped out"}),
    "a grammar's compilation": (_grammar, {"waiting for its grammar's compilation", "checking the grammar"}),
}


def _explain(served: Served, *arguments: str) -> Any:
    """Runs `quire explain` against the service; returns its JSON."""
    done = subprocess.run(
        [*QUIRE, "explain", *arguments, "--json", f"--target={served.grpc}"],
        cwd=ROOT,
        env={**os.environ, **DEFAULTS},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def _explained(served: Served) -> Any:
    """The newest explanation of the victim, once its front end's report is in the record."""
    end = time.monotonic() + 30
    while True:
        newest = _explain(served, VICTIM)["requests"][-1]
        if (not newest["live"] and newest["link_error_s"] is not None) or time.monotonic() > end:
            return newest


def _check(served: Served, name: str, plant: Plant, expected: set[str], *, seed: int) -> None:
    """Plants a cause, and asserts that the explanation sums up and names it first."""

    async def main() -> None:
        async with AsyncClient(served.grpc) as client:
            scene = Scene(served, client, random.Random(seed))
            await plant(scene)

    asyncio.run(main())
    found = _explained(served)
    causes = {each["cause"]: each["seconds"] for each in found["causes"]}
    print(f"{name}: {found['total_s']:.3f} s, " + ", ".join(f"{k} {v:.3f}" for k, v in list(causes.items())[:3]))

    assert sum(causes.values()) == pytest.approx(found["total_s"], rel=0.01)
    assert next(iter(causes)) in expected, json.dumps(found, indent=1)
    assert found["would_have_helped"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with one worker, a record and a tenant that may run one request."""
    folder = tmp_path_factory.mktemp("explain")
    admission = folder / "admission.toml"
    admission.write_text(_ADMISSION, encoding="utf-8")
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    record = folder / "record"
    with serve(checkpoint, *_FLAGS, f"--admission-file={admission}", f"--record-dir={record}", end=False) as running:
        yield running
        running.process.terminate()
        running.wait()


_BRIEF = {"a tenant's limit", "neighbours with long prompts", "a cold prefix"}
"""Causes that are planted in the default suite as well; the others take longer."""


@pytest.mark.parametrize(
    "name", [name if name in _BRIEF else pytest.param(name, marks=pytest.mark.release) for name in _PLANTS]
)
def test_a_planted_cause_is_named_first(served: Served, name: str) -> None:
    """Each cause is planted into the running service; `quire explain` names it first."""
    plant, expected = _PLANTS[name]
    _check(served, name, plant, expected, seed=len(name))


@pytest.mark.release
def test_a_swap_and_a_grammars_compilation_are_named_first(tmp_path: Path) -> None:
    """A victim whose KV is swapped out, and a request with a new, large grammar."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with serve(checkpoint, *_FLAGS, "--swap-space=64MiB", f"--record-dir={tmp_path / 'record'}") as running:
        for name, (plant, expected) in _SWAPPING.items():
            _check(running, name, plant, expected, seed=len(name))
