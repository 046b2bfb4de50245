"""Compare the headroom that admission learns with the best constant headroom, for ten workloads that fill the memory.

    python -m measure.studies.headroom

Every workload is a list of requests that all wait from the beginning. The real core runs them with a model worker in
virtual time (see `measure.plots.world`), once with the learned headroom and once with each of a range of constant ones.
Throughput is the number of generated tokens per second until the last request has ended. Compare also the preemptions:
each interrupts a stream.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from measure.plots.world import Job, run
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.workers.capacity import Capacity

NUM_REQUESTS = 500
SHARES = (0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Constant headrooms, as shares of all blocks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Length distributions of requests in tokens, and the worker that serves them."""

    name: str
    prompt: Callable[[random.Random], int]
    output: Callable[[random.Random], int]
    num_blocks: int = 480
    max_rows: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    tokens_per_s: float
    preemptions: int


def _between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: rng.randint(low, high)


def _one_of(*each: Callable[[random.Random], int]) -> Callable[[random.Random], int]:
    return lambda rng: rng.choice(each)(rng)


def _long_tail(mean: float, most: int) -> Callable[[random.Random], int]:
    return lambda rng: min(most, 1 + int(rng.expovariate(1 / mean)))


WORKLOADS = (
    Workload("equal outputs", _between(60, 60), _between(200, 200)),
    Workload("uniform outputs", _between(10, 100), _between(20, 400)),
    Workload("outputs with a long tail", _between(10, 100), _long_tail(150, 1500)),
    Workload("short and long outputs", _between(20, 60), _one_of(_between(5, 30), _between(400, 600))),
    Workload("long prompts, short outputs", _between(300, 600), _between(5, 40), num_blocks=960),
    Workload(
        "long prompts with a long tail", _one_of(_between(20, 80), _between(600, 1200)), _long_tail(120, 800), 960
    ),
    Workload("very long outputs", _between(10, 40), _between(600, 1200), num_blocks=960),
    Workload("memory for ten", _between(10, 60), _between(20, 220), num_blocks=120, max_rows=24),
    Workload("memory for four", _between(20, 80), _between(100, 300), num_blocks=64, max_rows=16),
    Workload("many small requests", _between(5, 20), _between(10, 80), num_blocks=240, max_rows=128),
)


def measure(workload: Workload, num_requests: int = NUM_REQUESTS) -> Outcome:
    """Run a workload with the current headroom."""
    rng = random.Random(workload.name)
    jobs = [
        Job(0.0, [rng.randrange(16, 900) for _ in range(workload.prompt(rng))], workload.output(rng))
        for _ in range(num_requests)
    ]
    config = CoreConfig(max_num_seqs=workload.max_rows, max_num_batched_tokens=512, prefix_cache="off")
    totals = run(config, jobs, num_blocks=workload.num_blocks, max_rows=workload.max_rows)
    return Outcome(sum(job.output for job in jobs) / totals.seconds, sum(job.preemptions for job in jobs))


@contextmanager
def constant(num_blocks: int) -> Iterator[None]:
    """Keep the headroom at this number of blocks."""
    learned = Capacity.headroom
    Capacity.headroom = property(lambda _: num_blocks)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Capacity.headroom = learned  # type: ignore[method-assign]


def main() -> None:
    """Print the table."""
    print("| workload | learned: tokens/s | preemptions | best constant: tokens/s | preemptions | blocks | ratio |")
    print("|---|---|---|---|---|---|---|")
    for workload in WORKLOADS:
        learned = measure(workload)
        constants = {}
        for num_blocks in sorted({int(share * workload.num_blocks) for share in SHARES}):
            with constant(num_blocks):
                constants[num_blocks] = measure(workload)
        best_size = max(constants, key=lambda size: constants[size].tokens_per_s)
        best = constants[best_size]
        ratio = learned.tokens_per_s / best.tokens_per_s
        print(
            f"| {workload.name} | {learned.tokens_per_s:.0f} | {learned.preemptions} | {best.tokens_per_s:.0f} |"
            f" {best.preemptions} | {best_size} of {workload.num_blocks} | {ratio:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
