"""Planted causes of slowness: each slows down one request of a running service for a known reason.

The scene's generator chooses lengths, numbers of neighbours, tenants and pauses. A planted cause must not depend on the
machine's speed, so it waits for first tokens and metrics, and makes the neighbours long.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from grpc import aio

from measure.testbed.service import PATIENCE_S, Served
from quire import AsyncClient, SchedulingOptions, errors
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc

ADMISSION = """
[tenants.single]
max_running = 1
[tenants.pair]
max_running = 2
[tenants.small]
max_running = 1
max_queued = 1
[tenants.metered]
tokens_per_s = 300.0
"""
SERVICES = {
    "few rows": ("--policy=priority", "--max-num-seqs=3", "--max-num-batched-tokens=2048", "--resume-keep-s=0"),
    "swap": (
        "--policy=priority",
        "--max-num-seqs=3",
        "--max-num-batched-tokens=2048",
        "--resume-keep-s=0",
        "--host-cache=64MiB",
    ),
    "many rows": ("--policy=fcfs", "--max-num-seqs=64", "--max-num-batched-tokens=128", "--itl-target-ms=0"),
    "large steps": ("--max-num-seqs=64", "--max-num-batched-tokens=4096", "--itl-target-ms=0"),
    "little memory": ("--max-num-seqs=16", "--max-tokens-in-paged-kv-cache=2048"),
}
"""Flags of the services that the plants need, by name."""
MAX_LENGTH = 4096
"""Longest sequence of the model that the plants need."""


@dataclass(slots=True)
class Scene:
    """A running service, a client of it, and the request that is made slow."""

    served: Served
    client: AsyncClient
    rng: random.Random
    victim: str
    """Id of the request."""
    drawn: dict[str, object] = field(default_factory=dict)
    """What the plant has drawn, for messages."""
    holders: set[str] = field(default_factory=set)
    """Requests, one of which must be named; empty if no request holds what the victim waits for."""

    def draw(self, what: str, low: int, high: int) -> int:
        """Draw a number from `low` to `high`, and remember it."""
        number = self.rng.randint(low, high)
        self.drawn[what] = number
        return number

    def prompt(self, length: int) -> list[int]:
        """Draw a prompt that no other request has."""
        return [self.rng.randrange(16, 300) for _ in range(length)]

    async def run(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: str = "",
        began: asyncio.Event | None = None,
    ) -> None:
        """Run a request to its end; set `began` at its first token."""
        stream = self.client.generate(
            token_ids=prompt,
            max_tokens=max_tokens,
            ignore_eos=True,
            request_id=name,
            scheduling=SchedulingOptions(priority=priority, tenant=tenant),
        )
        async for _ in stream:
            if began is not None:
                began.set()

    async def start(
        self, name: str, prompt: list[int], max_tokens: int, *, priority: int = 0, tenant: str = ""
    ) -> "asyncio.Task[None]":
        """Start a request and wait for its first token; return its task."""
        began = asyncio.Event()
        task = asyncio.ensure_future(self.run(name, prompt, max_tokens, priority=priority, tenant=tenant, began=began))
        await asyncio.wait_for(began.wait(), PATIENCE_S)
        return task

    async def until(self, metric: str, count: float) -> None:
        """Wait until a metric of the service has at least this value."""
        end = time.monotonic() + PATIENCE_S
        while await asyncio.to_thread(self.served.metric, metric) < count:
            assert time.monotonic() < end, f"{metric} has not reached {count}"


Plant = Callable[[Scene], Coroutine[None, None, None]]


async def _tenant_limit(scene: Scene) -> None:
    tenant = scene.drawn["tenant"] = scene.rng.choice(("single", "pair", "metered"))
    if tenant == "metered":
        # This exceeds the ten-second burst, so the tenant is in debt afterwards.
        await scene.run("spent", scene.prompt(scene.draw("prompt", 3300, 3900)), 4, tenant="metered")
        await scene.run(scene.victim, scene.prompt(scene.draw("victim's prompt", 4, 16)), 4, tenant="metered")
        return
    length = scene.draw("neighbour's tokens", 400, 700)
    scene.holders |= {"long-0", "long-1"}
    many = [
        await scene.start(f"long-{index}", scene.prompt(8), length, tenant=tenant)
        for index in range(1 if tenant == "single" else 2)
    ]
    await scene.run(scene.victim, scene.prompt(scene.draw("victim's prompt", 4, 16)), 4, tenant=tenant)
    await asyncio.gather(*many)


async def _full_queue(scene: Scene) -> None:
    count, length = scene.draw("neighbours", 12, 18), scene.draw("neighbours' tokens", 200, 300)
    scene.holders |= {f"early-{index}" for index in range(count)}
    many = [asyncio.ensure_future(scene.run(f"early-{index}", scene.prompt(8), length)) for index in range(count)]
    await scene.until("vllm:num_requests_waiting", count - 6)
    await scene.run(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 2, 8))
    await asyncio.gather(*many)


async def _long_prompts(scene: Scene) -> None:
    """Let the victim decode while prompts pass through the other rows, so that each of its steps has prompt chunks."""
    count, length = scene.draw("neighbours", 100, 140), scene.draw("neighbours' prompts", 700, 1000)
    many = [asyncio.ensure_future(scene.run(f"neighbour-{index}", scene.prompt(length), 1)) for index in range(count)]
    await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
    await scene.run(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 12, 20), priority=50)
    await asyncio.gather(*many)


async def _preemption(scene: Scene) -> None:
    victim = await scene.start(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 150, 250), priority=-5)
    scene.holders |= {f"urgent-{index}" for index in range(5)}
    count, length = scene.draw("urgent ones", 3, 5), scene.draw("their tokens", 500, 800)
    await asyncio.gather(
        *(scene.run(f"urgent-{index}", scene.prompt(8), length, priority=50) for index in range(count))
    )
    await victim


async def _slow_worker(scene: Scene) -> None:
    """Stop the worker again and again until the victim has ended."""
    await scene.run("usual", scene.prompt(8), 100)
    worker, pause_ms = scene.served.pid("worker"), scene.draw("pause, ms", 60, 120)
    victim = await scene.start(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 60, 100))
    for _ in range(1000):
        if victim.done():
            break
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(pause_ms / 1e3)
        os.kill(worker, signal.SIGCONT)
        await asyncio.sleep(0.005)
    await victim


async def _worker_killed(scene: Scene) -> None:
    victim = await scene.start(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 150, 300))
    os.kill(scene.served.pid("worker"), signal.SIGKILL)
    await victim


async def _later_requests(scene: Scene) -> None:
    """Let urgent requests arrive after the victim, which waits for one of three rows, and start before it."""
    running = [
        await scene.start(f"running-{index}", scene.prompt(8), scene.draw("first tokens", 60, 90), priority=60)
        for index in range(3)
    ]
    victim = asyncio.ensure_future(scene.run(scene.victim, scene.prompt(8), 4, priority=-9))
    await scene.until("vllm:num_requests_waiting", 1)
    count, length = scene.draw("urgent ones", 18, 24), scene.draw("their tokens", 150, 250)
    scene.holders |= {f"later-{index}" for index in range(count)}
    await asyncio.gather(
        *(scene.run(f"later-{index}", scene.prompt(8), length, priority=9) for index in range(count)), *running, victim
    )


async def _filled_steps(scene: Scene) -> None:
    """Let earlier prompts take each step's whole budget, while rows and memory are free."""
    count, length = scene.draw("neighbours", 6, 9), scene.draw("neighbours' prompts", 2500, 3900)
    scene.holders |= {f"long-{index}" for index in range(count)}
    many = [asyncio.ensure_future(scene.run(f"long-{index}", scene.prompt(length), 1)) for index in range(count)]
    await scene.until("vllm:num_requests_running", 1)
    await scene.run(scene.victim, scene.prompt(8), 2)
    await asyncio.gather(*many)


async def _crowd(scene: Scene) -> None:
    """Let many rows with long contexts share the victim's steps; only the usual cost alone is known."""
    await scene.run("alone", scene.prompt(8), 60)
    count, length = scene.draw("neighbours", 45, 60), scene.draw("neighbours' prompts", 900, 1100)
    scene.holders |= {f"beside-{index}" for index in range(count)}
    many = [asyncio.ensure_future(scene.run(f"beside-{index}", scene.prompt(length), 2000)) for index in range(count)]
    await scene.until("vllm:num_requests_running", count)
    await scene.run(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 60, 90))
    for each in many:
        each.cancel()
    await asyncio.gather(*many, return_exceptions=True)


async def _full_memory(scene: Scene) -> None:
    """Let requests hold all blocks; the victim is not the first that waits for some."""
    held = [
        await scene.start(f"holder-{index}", scene.prompt(800), scene.draw("holder's tokens", 150, 190))
        for index in range(2)
    ]
    early = [asyncio.ensure_future(scene.run(f"early-{index}", scene.prompt(900), 40)) for index in range(3)]
    await scene.until("vllm:num_requests_waiting", 3)
    scene.holders |= {f"holder-{index}" for index in range(2)} | {f"early-{index}" for index in range(3)}
    await scene.run(scene.victim, scene.prompt(1000), 4)
    await asyncio.gather(*held, *early)


async def _refusal(scene: Scene) -> None:
    running = await scene.start("running", scene.prompt(8), 400, tenant="small")
    waiting = asyncio.ensure_future(scene.run("waiting", scene.prompt(8), 4, tenant="small"))
    await scene.until("vllm:num_requests_waiting", 1)
    with contextlib.suppress(errors.QueueFullError):
        await scene.run(scene.victim, scene.prompt(8), 4, tenant="small")
    await asyncio.gather(running, waiting)


async def _frozen(scene: Scene, role: str, low: int, high: int) -> None:
    """Stop a process for some seconds while the victim decodes.

    The victim has few tokens. On a busy machine each takes about 10 ms, most of it between the processes, so many
    tokens would take longer than the process is stopped.
    """
    await scene.run("usual", scene.prompt(8), 60)
    process = scene.served.pid(role)  # Looking for it takes time, in which the victim might end.
    victim = await scene.start(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 100, 150))
    os.kill(process, signal.SIGSTOP)
    await asyncio.sleep(scene.draw("seconds", low, high))
    os.kill(process, signal.SIGCONT)
    await victim


async def _scheduler_frozen(scene: Scene) -> None:
    await _frozen(scene, "scheduler", 4, 6)


async def _worker_frozen(scene: Scene) -> None:
    await _frozen(scene, "worker", 5, 7)


async def _frontend_frozen(scene: Scene) -> None:
    await _frozen(scene, "frontend", 5, 7)  # After 10 s, the scheduler would consider the front end lost.


async def _scheduler_killed(scene: Scene) -> None:
    victim = await scene.start(scene.victim, scene.prompt(8), scene.draw("victim's tokens", 150, 300))
    os.kill(scene.served.pid("scheduler"), signal.SIGKILL)
    await victim


async def _cold_prefix(scene: Scene) -> None:
    """Lose a cached prompt with its worker. Other prompts warm up the new worker before the same prompt returns."""
    length = scene.draw("prompt", 2500, 4000)
    prompt = scene.prompt(length)
    await scene.run("first", prompt, 1)
    os.kill(scene.served.pid("worker"), signal.SIGKILL)
    for index in range(2):
        await scene.run(f"between-{index}", scene.prompt(length), 1)
    await scene.run(scene.victim, prompt, 1)


async def _stalled_reader(scene: Scene) -> None:
    """Read one message, then nothing for a while. gRPC buffers 64 KiB meanwhile, so the messages are large."""
    async with aio.insecure_channel(scene.served.grpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            v1.GenerateRequest(
                token_ids=v1.TokenIds(ids=scene.prompt(8)),
                request_id=scene.victim,
                stop=v1.StopOptions(max_tokens=scene.draw("victim's tokens", 350, 500), ignore_eos=True),
                output=v1.OutputOptions(logprobs=20),
            )
        )
        await call.read()
        # Here the cause is planted: a client that does not read.
        await asyncio.sleep(scene.draw("pause, s", 8, 15))
        while await call.read() is not aio.EOF:
            pass


async def _grammar(scene: Scene) -> None:
    count = scene.draw("words", 350, 450)
    words = ["".join(scene.rng.choices("abcdefghij", k=12)) for _ in range(count)]
    stream = scene.client.generate(
        token_ids=scene.prompt(8),
        max_tokens=4,
        request_id=scene.victim,
        regex=f"(({'|'.join(words)}) ){{1,40}}",
    )
    async for _ in stream:
        pass


@dataclass(frozen=True, slots=True)
class Planted:
    """A cause, how it is planted, and the names that `quire explain` has for it."""

    plant: Plant
    names: frozenset[str]
    service: str = "few rows"
    """The service that it needs, a key of `SERVICES`."""
    shares_cpu: bool = False
    """Whether the cause costs CPU time, so that other load on the machine can cost the victim even more."""


CAUSES: dict[str, Planted] = {
    "a tenant's limit": Planted(_tenant_limit, frozenset({"waiting for its tenant's limit"})),
    "a full queue": Planted(_full_queue, frozenset({"waiting for a free row"})),
    "neighbours with long prompts": Planted(
        _long_prompts, frozenset({"other prompts' chunks in its steps"}), shares_cpu=True
    ),
    "preemption by priority": Planted(_preemption, frozenset({"preempted"})),
    "a swap": Planted(_preemption, frozenset({"swapped out"}), "swap"),
    "a slow worker": Planted(_slow_worker, frozenset({"slow worker"})),
    "a stalled reader": Planted(
        _stalled_reader, frozenset({"held out: its reader took no output", "the client's own slowness"})
    ),
    "a killed worker": Planted(_worker_killed, frozenset({"worker lost"})),
    "a grammar's compilation": Planted(
        _grammar, frozenset({"waiting for its grammar's compilation", "checking the grammar"})
    ),
    "a cold prefix": Planted(
        _cold_prefix, frozenset({"own prefill of a prefix that was known before"}), shares_cpu=True
    ),
    "later requests": Planted(_later_requests, frozenset({"waiting behind later requests"})),
    "prompts that fill the steps": Planted(
        _filled_steps, frozenset({"waiting for room in a step that other prompts fill"}), "many rows"
    ),
    "many rows in its steps": Planted(
        _crowd, frozenset({"other requests in its steps"}), "large steps", shares_cpu=True
    ),
    "full memory": Planted(_full_memory, frozenset({"waiting for memory"}), "little memory"),
    "a refusal": Planted(_refusal, frozenset({"refused"})),
    "a killed scheduler": Planted(_scheduler_killed, frozenset({"scheduler restarted"})),
    "a frozen scheduler": Planted(_scheduler_frozen, frozenset({"scheduler frozen"})),
    "a frozen worker": Planted(_worker_frozen, frozenset({"worker frozen"})),
    "a frozen front end": Planted(_frontend_frozen, frozenset({"front end"})),
}
"""The causes."""
