"""The cost of overload: the same requests at a sustainable rate, and at ten times that rate.

    python -m checks.chaos.overload --json overload.json --plot docs/plots/overload.svg

1x is the highest tested rate at which 99 % of requests meet their deadline. At 10x most requests must be refused, and
accepted ones must be served as well as at 1x. The Poisson arrivals are the same in every run and independent of earlier
outcomes. Refused requests are not retried.
"""

import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checks.chaos import command
from checks.chaos.campaign import quantiles
from measure.load.svg import Series, lines
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient, SchedulingOptions
from quire.errors import QueueFullError, QuireError

PROMPT = 64
OUTPUT = (192, 448)
"""Range of output lengths, drawn uniformly. Equal lengths would make requests end and begin in lockstep."""
MAX_NUM_SEQS, MAX_QUEUED_REQUESTS = 8, 8
DEADLINE_S, TTFT_TARGET_S = 60.0, 8.0
"""Limits for every request. A request that misses either counts as not served."""
SHARES = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
"""Rates to try in turn until enough requests meet their deadline, as shares of the throughput without pauses."""
IN_TIME = 0.99
"""Share of all requests that must be in time at 1x."""


@dataclass(slots=True)
class Phase:
    """Results at one request rate."""

    rate: float
    seconds: float
    ttft_s: list[float] = field(default_factory=list)
    """TTFT of admitted requests."""
    begun: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """End time of every request since the start, and its tokens if it was served in time."""
    in_time: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory of scheduler and front end together."""
    generator_cpu: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the results as JSON."""
        sent = sum(self.outcomes.values())
        return {
            "rate_per_s": round(self.rate, 3),
            "seconds": round(self.seconds, 1),
            "sent": sent,
            "in_time": self.in_time,
            "goodput_tok_per_s": round(sum(tokens for _, tokens in self.ends) / self.seconds, 1),
            "outcomes": dict(self.outcomes),
            "ttft_s": quantiles(self.ttft_s),
            "health_s": quantiles(self.health_s),
            "memory_mb": {
                "first": round(self.memory_mb[0], 1),
                "last": round(self.memory_mb[-1], 1),
                "most": round(max(self.memory_mb), 1),
            },
            "generator_cpu_share": round(self.generator_cpu / self.seconds, 3),
            "goodput_by_10_s": [round(tokens, 1) for _, tokens in self.goodput()],
        }

    def goodput(self, window_s: float = 10.0) -> list[tuple[float, float]]:
        """Return (middle, tokens per second of requests that ended in time) for each whole window."""
        num_windows = int(self.seconds / window_s)
        counts: Counter[int] = Counter()
        for at, tokens in self.ends:
            counts[int(at / window_s)] += tokens
        return [((index + 0.5) * window_s, counts[index] / window_s) for index in range(num_windows)]


async def run(served: Served, rate: float, seconds: float) -> Phase:
    """Send requests at a rate for a duration, then wait for all of them."""
    phase, rng = Phase(rate, seconds), random.Random(1)
    cpu = _own_cpu()
    watching = asyncio.create_task(_watch(served, phase))
    async with AsyncClient(served.grpc) as client, asyncio.TaskGroup() as tasks:
        phase.begun = begin = time.monotonic()
        at = 0.0
        while (at := at + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            tasks.create_task(_one(client, *_draw(rng), phase))
    # The period for the rate ends with the last admitted request, so late responses lower the rate.
    phase.seconds = time.monotonic() - begin
    watching.cancel()
    phase.generator_cpu = _own_cpu() - cpu
    return phase


def _draw(rng: random.Random) -> tuple[list[int], int]:
    """Return a prompt and a number of output tokens."""
    return [rng.randrange(16, 380) for _ in range(PROMPT)], rng.randint(*OUTPUT)


async def _one(client: AsyncClient, prompt: list[int], length: int, phase: Phase) -> None:
    begin = time.monotonic()
    stream = client.generate(
        token_ids=prompt,
        max_tokens=length,
        temperature=0,
        ignore_eos=True,
        timeout=DEADLINE_S,
        scheduling=SchedulingOptions(ttft_target_s=TTFT_TARGET_S),
    )
    first = 0.0
    try:
        async for _ in stream:
            first = first or time.monotonic() - begin
    except QuireError as error:
        phase.outcomes[f"{error.code} after its first token" if first else error.code] += 1
    else:
        phase.outcomes["OK"] += 1
    in_time = stream.finished is not None and first <= TTFT_TARGET_S
    phase.in_time += in_time
    phase.ends.append((time.monotonic() - phase.begun, length * in_time))
    if first:
        phase.ttft_s.append(first)


async def _watch(served: Served, phase: Phase) -> None:
    """Sample the response time of the health check and the memory in use."""
    watched = [*served.children("scheduler"), *served.children("frontend")]
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            begin = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
            phase.health_s.append(time.monotonic() - begin)
            phase.memory_mb.append(sum(psutil.Process(p.pid).memory_info().rss for p in watched) / 1e6)
            await asyncio.sleep(0.2)


async def capacity(served: Served, seconds: float = 60.0) -> float:
    """Return the sustainable request rate: tokens per second divided by the mean tokens per request.

    Counting finished requests would be inaccurate: there are few, and all rows are busy only late in the run.
    """
    begin = time.monotonic()
    counted_from, end = begin + seconds / 3, begin + seconds
    num_tokens = 0

    async def one_after_another(client: AsyncClient, rng: random.Random) -> None:
        nonlocal num_tokens
        while time.monotonic() < end:
            prompt, length = _draw(rng)
            try:
                async for piece in client.generate(token_ids=prompt, max_tokens=length, temperature=0, ignore_eos=True):
                    if counted_from <= time.monotonic() < end:
                        num_tokens += len(piece.token_ids)
            except QueueFullError as error:  # All requests start at once, and the queue has less room.
                await asyncio.sleep(error.retry_after_s or 0.1)

    async with AsyncClient(served.grpc) as client, asyncio.TaskGroup() as tasks:
        for index in range(MAX_NUM_SEQS):
            tasks.create_task(one_after_another(client, random.Random(index)))
    throughput = num_tokens / (end - counted_from) / (sum(OUTPUT) / 2)
    print(f"{throughput:.3f} requests per second without pauses", flush=True)
    return throughput


def _own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(served: Served, rate: float, normal_s: float, overload_s: float) -> tuple[Phase, Phase]:
    """Measure 1x, then 10x.

    Without a given rate, 1x is the highest of a few rates at which requests meet their deadlines.
    """
    rates = [rate]
    if not rate:
        throughput = await capacity(served)
        rates = [share * throughput for share in SHARES]
    await run(served, rates[-1], 10.0)  # Warm up: the scheduler learns step times, and memory is allocated.
    for rate in rates:
        normal = await run(served, rate, normal_s)
        print(json.dumps(normal.figures()), flush=True)
        if normal.in_time >= IN_TIME * sum(normal.outcomes.values()):
            break
    return normal, await run(served, 10 * rate, overload_s)


def compare(normal: Phase, overload: Phase) -> dict[str, Any]:
    """Return the results at both rates, and their ratios."""
    one, ten = normal.figures(), overload.figures()
    return {
        "deadline_s": DEADLINE_S,
        "ttft_target_s": TTFT_TARGET_S,
        "1x": one,
        "10x": ten,
        "goodput_kept": round(ten["goodput_tok_per_s"] / max(one["goodput_tok_per_s"], 0.1), 3),
        "ttft_p99_ratio": round(ten["ttft_s"]["p99"] / one["ttft_s"]["p99"], 2),
    }


def plot(normal: Phase, overload: Phase) -> str:
    """Plot goodput over time at both rates, and the target."""
    promised = 0.95 * normal.figures()["goodput_tok_per_s"]
    end = overload.goodput()[-1][0]
    return lines(
        "Tokens/s of requests that met their deadline",
        "seconds",
        "tokens/s",
        [
            Series("at 1x", normal.goodput()),
            Series("at 10x", overload.goodput()),
            Series("95 % of 1x", [(0, promised), (end, promised)], is_bound=True),
        ],
    )


def main() -> int:
    """Measure; print and write the results."""
    parser = command.parser("checks.chaos.overload", __doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of the overload")
    parser.add_argument("--normal-seconds", type=float, default=180.0, help="of the time at 1x, and of each try for it")
    parser.add_argument("--rate", type=float, default=0.0, help="1x, requests/s, if it is known")
    parser.add_argument("--plot", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-overload-") as folder:
        # Large enough to keep a worker busy for a while.
        checkpoint = make_checkpoint(
            "LlamaForCausalLM", Path(folder) / "model", hidden_size=512, intermediate_size=1408, num_hidden_layers=24,
            num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        limits = (f"--max-num-seqs={MAX_NUM_SEQS}", f"--max-queued-requests={MAX_QUEUED_REQUESTS}")
        with serve(checkpoint, "--dtype=float32", "--policy=edf", *limits) as served:
            phases = asyncio.run(measure(served, options.rate, options.normal_seconds, options.seconds))
    command.tell(compare(*phases), options.json)
    if options.plot is not None:
        options.plot.write_text(plot(*phases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
