"""One seeded workload per claim in docs/scheduling.md, run by the real core, and its chart."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from measure.load.svg import Series, bars, lines
from measure.plots.world import STEP_S, Job, Totals, run
from scheduler_svc.core.interface.config import CAPACITY_MODES, PREFIX_CACHES, VICTIM_RULES, CoreConfig
from scheduler_svc.core.queueing.policies import AGEING_S, FairPolicy

LOADS = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0)
"""Request rates per second."""
_ROWS = 8


def _config(**limits: Any) -> CoreConfig:
    return CoreConfig(**({"max_num_seqs": _ROWS, "max_num_batched_tokens": 256} | limits))


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


def _poisson(rng: random.Random, per_s: float, count: int, job: Callable[[float], Job]) -> list[Job]:
    now, jobs = 0.0, []
    for _ in range(count):
        now += rng.expovariate(per_s)
        jobs.append(job(now))
    return jobs


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(flags: Sequence[bool]) -> float:
    return 100 * _mean(flags)


# ---------------------------------------------------------------- fair


def fair() -> str:
    """Compare two tenants that always have waiting requests. One sends twice as many, each eight times as long."""
    measured = []
    longest, memory = 64, 256 * 16
    until = 40.0
    for policy in ("fcfs", "fair"):
        rng = random.Random("fair")
        jobs = [Job(0.0, _prompt(rng, 8), 25, tenant="a") for _ in range(400)]
        jobs += [Job(0.0, _prompt(rng, longest), 200, tenant="b") for _ in range(800)]
        rng.shuffle(jobs)
        run(_config(policy=policy, prefix_cache="off"), jobs, num_blocks=memory // 16)
        backlogged = min(max(job.started or 0.0 for job in jobs if job.tenant == name) for name in "ab")
        measured.append(Series(policy, _service_difference(jobs, min(until, backlogged))))
    bound = 2 * max(FairPolicy.INPUT_WEIGHT * longest, FairPolicy.OUTPUT_WEIGHT * memory)
    end = max(x for each in measured for x, _ in each.points)
    promised = Series("bound under fair", [(0, bound), (end, bound)], is_bound=True)
    return lines("Two backlogged tenants", "s", "difference in service (weighted tokens)", [*measured, promised])


def _service_difference(jobs: Sequence[Job], until: float) -> list[tuple[float, float]]:
    changes = []
    for job in jobs:
        sign = 1 if job.tenant == "a" else -1
        if job.started is not None:
            changes.append((job.started, sign * FairPolicy.INPUT_WEIGHT * len(job.prompt)))
        changes += [(time, sign * FairPolicy.OUTPUT_WEIGHT) for time in job.token_times]
    points, difference, shown = [(0.0, 0.0)], 0.0, 0.0
    for time, change in sorted(changes):
        if time > until:
            break
        difference += change
        if time - shown > until / 200:
            shown = time
            points.append((time, abs(difference)))
    return points


# ---------------------------------------------------------------- priority


def priority() -> str:
    """Overload the worker, half with urgent requests; plot the requests overtaken by later ones, by priority level."""
    rng = random.Random("priority")
    jobs = _poisson(rng, 20.0, 1500, lambda now: Job(now, _prompt(rng, 16), 80, priority=rng.choice((0, 1, 2, 3))))
    run(_config(policy="priority", policy_preemption="off"), jobs)
    by_start = sorted(jobs, key=lambda job: job.started or 0.0)
    worst = [0.0] * 4
    for place, late in enumerate(by_start):
        for early in by_start[place + 1 :]:
            levels = late.priority - early.priority
            if levels > 0:
                worst[levels] = max(worst[levels], late.arrival - early.arrival)
    groups = [f"{levels} level{'s' * (levels > 1)}" for levels in (1, 2, 3)]
    promised = [AGEING_S * levels for levels in (1, 2, 3)]
    series = [("latest arrival that went first", worst[1:]), ("bound", promised)]
    return bars("Overload under priority: requests overtaken by later arrivals", "s later", groups, series)


# ---------------------------------------------------------------- sjf, edf


def _mixed(seed: str, per_s: float, wanted: bool = False) -> list[Job]:
    rng = random.Random(seed)

    def job(now: float) -> Job:
        output = 200 if rng.random() < 0.2 else rng.randint(5, 40)
        # From barely enough time to plenty, as multiples of the request's duration when it runs alone.
        slack = rng.uniform(1.2, 5) if wanted else None
        wanted_s = slack * (output + 2) * 1.5 * STEP_S if slack is not None else None
        return Job(now, _prompt(rng, rng.randint(10, 100)), output, hint=output, wanted_s=wanted_s)

    return _poisson(rng, per_s, 600, job)


def sjf() -> str:
    """Mix short and long requests with hints: the mean latency by load."""
    measured = []
    for policy in ("fcfs", "sjf"):
        points = []
        for load in LOADS:
            jobs = _mixed("sjf", load * 2)
            run(_config(policy=policy), jobs)
            points.append((load * 2, _mean([job.latency for job in jobs])))
        measured.append(Series(policy, points))
    return lines("Lengths that vary widely", "requests per second", "mean latency, s", measured)


def edf() -> str:
    """Draw requests with targets from tight to loose: the share that meets them by load."""
    measured = []
    for policy in ("fcfs", "edf"):
        points = []
        for load in LOADS:
            jobs = _mixed("edf", load * 2, wanted=True)
            run(_config(policy=policy), jobs)
            points.append((load * 2, _share([job.on_time for job in jobs])))
        measured.append(Series(policy, points))
    return lines("Requests with targets", "requests per second", "% that meet their target", measured)


# ---------------------------------------------------------------- lpm


def lpm() -> str:
    """Use twelve shared prefixes, about four of which fit into the cache; plot the cached tokens."""
    measured = []
    for policy in ("fcfs", "lpm"):
        points = []
        for load in LOADS:
            jobs = _families("lpm", load * 4)
            run(_config(policy=policy, max_num_seqs=4), jobs, num_blocks=120)
            found = sum(job.cached_tokens for job in jobs) / sum(len(job.prompt) for job in jobs)
            points.append((load * 4, 100 * found))
        measured.append(Series(policy, points))
    return lines("Many shared prefixes, little memory", "requests per second", "% of prompt tokens cached", measured)


def _families(seed: str, per_s: float) -> list[Job]:
    rng = random.Random(seed)
    families = [_prompt(rng, 320) for _ in range(12)]
    return _poisson(
        rng, per_s, 500, lambda now: Job(now, [*rng.choice(families), *_prompt(rng, 8)], rng.randint(5, 20))
    )


# ---------------------------------------------------------------- victims


@dataclass(frozen=True, slots=True)
class VictimRow:
    """Result of one rule."""

    rule: str
    preemptions: int
    urgent_on_time: float
    """Percent."""
    computed_tokens: int
    others_latency: float


MEMORY = {"memory is short": 160, "rows are short": 260}
"""Blocks."""


def victim_rows(num_blocks: int) -> list[VictimRow]:
    """Fill rows and memory with long requests and add urgent ones; return the cost of each victim rule."""
    rows = []
    for rule in VICTIM_RULES:
        jobs = _urgent_and_others("victims")
        limits = _config(policy="priority", victim_rule=rule, prefix_cache="off")
        totals = run(limits, jobs, num_blocks=num_blocks)
        urgent = [each for each in jobs if each.wanted_s]
        others = [each.latency for each in jobs if not each.wanted_s]
        preemptions = sum(each.preemptions for each in jobs)
        on_time = _share([each.on_time for each in urgent])
        rows.append(VictimRow(rule, preemptions, on_time, totals.computed_tokens, _mean(others)))
    return rows


def _urgent_and_others(seed: str) -> list[Job]:
    rng = random.Random(seed)

    def job(now: float) -> Job:
        if rng.random() < 0.35:
            return Job(now, _prompt(rng, rng.randint(50, 600)), 20, priority=3, wanted_s=1.0)
        return Job(now, _prompt(rng, rng.randint(20, 400)), rng.randint(40, 300), priority=rng.choice((0, 1)))

    return _poisson(rng, 5.0, 600, job)


def victims() -> str:
    """Draw the preemptions by rule."""
    series = [
        (name, [float(row.preemptions) for row in victim_rows(num_blocks)]) for name, num_blocks in MEMORY.items()
    ]
    return bars("Urgent requests pause others", "preemptions", VICTIM_RULES, series)


def victim_table() -> str:
    """Return the preemptions by rule as a Markdown table."""
    head = "| | rule | preemptions | urgent on time | tokens computed | mean latency of the others |"
    table = [head, "|---|---|---|---|---|---|"]
    for name, num_blocks in MEMORY.items():
        for row in victim_rows(num_blocks):
            table.append(
                f"| {name} | `{row.rule}` | {row.preemptions} | {row.urgent_on_time:.1f} % | {row.computed_tokens:,} |"
                f" {row.others_latency:.2f} s |"
            )
    return "\n".join(table)


# ---------------------------------------------------------------- capacity


def capacity() -> str:
    """Run requests with long outputs: preemptions and total time, by capacity mode."""
    totals: dict[str, tuple[int, Totals]] = {}
    for mode in CAPACITY_MODES:
        jobs = _hungry("capacity")
        result = run(_config(capacity=mode, max_num_seqs=24), jobs, num_blocks=120, max_rows=24)
        totals[mode] = sum(job.preemptions for job in jobs), result
    series = [
        ("preemptions", [float(count) for count, _ in totals.values()]),
        ("seconds for all", [result.seconds for _, result in totals.values()]),
    ]
    return bars("400 requests, memory for about ten", "", list(totals), series)


def _hungry(seed: str) -> list[Job]:
    rng = random.Random(seed)
    return _poisson(rng, 20.0, 400, lambda now: Job(now, _prompt(rng, rng.randint(10, 60)), rng.randint(20, 220)))


# ---------------------------------------------------------------- swap, prefix cache


def swap() -> str:
    """Run the workload of the victim rules with less memory, with and without host memory for swaps."""
    tokens, latency = [], []
    for num_host_blocks in (0, 512):
        jobs = _urgent_and_others("victims")
        limits = _config(policy="priority", prefix_cache="off")
        totals = run(limits, jobs, num_blocks=MEMORY["memory is short"], num_host_blocks=num_host_blocks)
        tokens.append(totals.computed_tokens / 1000)
        latency.append(100 * _mean([job.latency for job in jobs]))
    series = [("thousand tokens computed", tokens), ("mean latency, 10 ms", latency)]
    return bars("Paused requests are computed again, or swapped", "", ["recompute", "swap"], series)


def prefix_cache() -> str:
    """Run 30-token prompts that share 24 tokens; plot the cached tokens for 16-token blocks."""
    found = []
    for kind in PREFIX_CACHES:
        rng = random.Random("prefix cache")
        shared = _prompt(rng, 24)
        jobs = _poisson(rng, 10.0, 300, partial(_sharing, rng, shared))
        run(_config(prefix_cache=kind), jobs)
        found.append(100 * sum(job.cached_tokens for job in jobs) / sum(len(job.prompt) for job in jobs))
    return bars("Prompts of 30 tokens that share 24", "% of prompt tokens cached", PREFIX_CACHES, [("found", found)])


def _sharing(rng: random.Random, shared: list[int], now: float) -> Job:
    return Job(now, [*shared, *_prompt(rng, 6)], rng.randint(5, 20))


CLAIMS: dict[str, Callable[[], str]] = {
    "fair": fair,
    "priority": priority,
    "sjf": sjf,
    "edf": edf,
    "lpm": lpm,
    "victims": victims,
    "capacity": capacity,
    "swap": swap,
    "prefix_cache": prefix_cache,
}
