"""Compare every policy with fcfs at what the policy is for, on three workloads each, in virtual time.

    python -m measure.studies.policy_margins --traces FOLDER --json measure/results/policy_margins.json

The devices are those of `quire bench policies` (docs/arena.md), 8B on one H100. A policy and fcfs get the same jobs.
For `priority`, `edf` and `fair`, jobs of traces and of `bursts` get a priority, a target or a tenant at random. With
several seeds, the table contains medians and ranges.
"""

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure.policies.arena import Run, Served, Workload, run
from measure.policies.costs import PRESETS, Costs
from measure.policies.jobs import Job
from measure.policies.metrics import meets_targets, quantile, service_difference, ttft_s
from measure.policies.schedulers import Setup, make, parse
from measure.policies.workloads import DRAWN, Agents, Drawing, OpenLoop, trace_of, traced

_COSTS = PRESETS["8b-h100"]
_AGENT_KV_TOKENS = 131_072
_TARGETS_S = (0.5, 2.0, 10.0)


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a policy is for: a metric, and the workloads on which it is compared."""

    metric: str
    measure: Callable[[Run], float]
    workloads: tuple[str, ...]
    is_larger_better: bool = False


def _urgent_p99(outcome: Run) -> float:
    return quantile([ttft_s(each) for each in outcome.served if each.job.group == "urgent"], 0.99) or 0.0


def _outside(outcome: Run) -> float:
    return statistics.fmean(not meets_targets(each) for each in outcome.served)


def _first_in_time(outcome: Run) -> float:
    return statistics.fmean(ttft_s(each) <= _target(each) for each in outcome.served)


def _target(served: Served) -> float:
    assert served.job.ttft_target_s is not None
    return served.job.ttft_target_s


def _mean_latency(outcome: Run) -> float:
    return statistics.fmean(each.ended - each.job.at for each in outcome.served)


def _cached(outcome: Run) -> float:
    return sum(each.cached for each in outcome.served) / sum(each.job.num_prompt for each in outcome.served)


def _difference(outcome: Run) -> float:
    return service_difference(outcome.served) or 0.0


PURPOSES = {
    "priority": Purpose("TTFT of urgent requests, p99, s", _urgent_p99, ("mooncake", "conversations", "priorities")),
    "edf": Purpose(
        "first tokens within their targets", _first_in_time, ("mooncake", "conversations", "deadlines"), True
    ),
    "sjf": Purpose("mean latency, s", _mean_latency, ("mooncake", "conversations", "bursts")),
    "slo": Purpose("requests outside the targets", _outside, ("mooncake", "code", "bursts")),
    "fair": Purpose("difference in service, tokens", _difference, ("vtc", "conversations", "bursts")),
    "lpm": Purpose("cached share of the prompt tokens", _cached, ("mooncake", "agents", "prefixes"), True),
}
_TRACES = {
    "mooncake": ("mooncake", "mooncake_conversation_0-30min.jsonl.gz", 120.0, 0.5),
    "code": ("azure", "azure_code_first_half.csv.gz", 270.0, 2.5),
    "conversations": ("azure", "azure_conv_first_half.csv.gz", 80.0, 6.0),
}
"""Kind, file, length in seconds, and share of the trace."""
_LOADS = {
    "vtc": (20.0, 1.5),
    "priorities": (40.0, 1.2),
    "deadlines": (40.0, 1.2),
    "bursts": (70.0, 0.9),
    "prefixes": (60.0, 1.5),
}
"""Length in seconds and share of the capacity of drawn workloads."""
_NUM_USERS = 32


def workload(name: str, policy: str, traces: Path, seed: int) -> tuple[Workload, Costs]:
    """Return a workload whose jobs have what the policy needs, and the devices."""
    if name == "agents":
        users = _NUM_USERS
        return Agents(users=users, sessions=2 * users, seed=seed), dataclasses.replace(
            _COSTS, kv_tokens=_AGENT_KV_TOKENS
        )
    if name in _TRACES:
        kind, file, seconds, share = _TRACES[name]
        found = traced(kind, trace_of(kind, traces / file, seconds), share, _COSTS, seed)
    else:
        seconds, load = _LOADS[name]
        found = DRAWN[name](Drawing(seconds=seconds, load=load, costs=_COSTS, num_workers=1, seed=seed))
    if name in ("vtc", "priorities", "deadlines", "prefixes"):
        return found, _COSTS
    rng = random.Random(seed)
    return OpenLoop(name=name, load=found.load, jobs=[_marked(job, policy, rng) for job in found.jobs]), _COSTS


def _marked(job: Job, policy: str, rng: random.Random) -> Job:
    """Return a job with a priority, a target or a tenant, at random."""
    if policy == "priority":
        name, priority = rng.choices((("urgent", 2), ("normal", 1), ("batch", 0)), (1, 3, 6))[0]
        return dataclasses.replace(job, priority=priority, group=name)
    if policy == "edf":
        target_s = rng.choice(_TARGETS_S)
        return dataclasses.replace(job, ttft_target_s=target_s, tpot_target_s=10.0, tells_targets=True)
    if policy == "fair":
        return dataclasses.replace(job, tenant=rng.choices(("one", "two"), (1, 2))[0])
    return job


@dataclass(frozen=True, slots=True)
class Margin:
    """A policy compared with fcfs on one workload and seed."""

    policy: str
    workload: str
    metric: str
    seed: int
    fcfs: float
    value: float


def compare(policy: str, name: str, traces: Path, seed: int) -> Margin:
    """Serve one workload under a policy and under fcfs."""
    purpose = PURPOSES[policy]
    values = []
    for each in ("fcfs", policy):
        jobs, costs = workload(name, policy, traces, seed)
        setup = Setup(costs=costs, num_workers=1, in_flight=1)
        values.append(purpose.measure(run(make(parse(f"quire:{each}"), setup), jobs, costs)))
    return Margin(policy, name, purpose.metric, seed, *values)


def table(margins: Sequence[Margin]) -> str:
    """Return medians over the seeds, and the range of the ratios."""
    lines = ["| policy | metric | workload | fcfs | policy | ratio | range |", "|---|---|---|--:|--:|--:|---|"]
    for policy, purpose in PURPOSES.items():
        for name in purpose.workloads:
            found = [each for each in margins if (each.policy, each.workload) == (policy, name)]
            if found:
                ratios = [each.value / max(1e-9, each.fcfs) for each in found]
                fcfs, value = (statistics.median(of) for of in ([e.fcfs for e in found], [e.value for e in found]))
                lines.append(
                    f"| `{policy}` | {purpose.metric} | {name} | {fcfs:,.3g} | {value:,.3g} |"
                    f" {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
                )
    return "\n".join(lines)


def main() -> None:
    """Run, write the results and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", type=Path, default=Path())
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--policies", default=",".join(PURPOSES))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    margins = []
    for policy in options.policies.split(","):
        for name in PURPOSES[policy].workloads:
            for seed in map(int, options.seeds.split(",")):
                margins.append(compare(policy, name, options.traces, seed))
                print(margins[-1], flush=True)
            if options.json is not None:
                found = {"results": [dataclasses.asdict(each) for each in margins]}
                options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(table(margins))


if __name__ == "__main__":
    main()
