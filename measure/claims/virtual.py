"""Studies in virtual time: Quire's scheduler on a simulated H100 with a model of 8B (docs/arena.md). Seeded."""

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from measure.policies.arena import Run, Workload, run
from measure.policies.costs import PRESETS, Costs, Work
from measure.policies.jobs import Job, Piece
from measure.policies.metrics import metrics, quantile, ttft_s
from measure.policies.quire_engine import QuireEngine
from measure.policies.schedulers import Setup, parse, quire_config
from measure.policies.workloads import DRAWN, Agents, Drawing, OpenLoop, capacity

Values = dict[str, object]
"""A JSON object."""

COSTS = PRESETS["8b-h100"]
SEEDS = (1, 2, 3)
_PROMPTS, _OUTPUTS = 1 << 50, 1 << 51
"""Leading names of the pieces of a job."""

WINDOWS_MS = (10, 50, 200, 1000)
"""Windows of dynamic batching."""
WINDOW_LOADS = (0.05, 0.3)
"""Shares of the capacity at which windows are compared."""
_WINDOW_ROWS, _WINDOW_REQUESTS, _WINDOW_PROMPT, _WINDOW_OUTPUT = 16, 100, 256, 64

_LOADS = tuple(share / 20 for share in range(1, 25))
"""Shares of the capacity that are tried, in ascending order."""
BUDGETS = {"whole prompts": 1 << 17, "chunks of 2,048": 2048, "chunks of 512": 512}
"""Token budget per step. The largest one holds every prompt."""
STRICT, RELAXED = 5, 25
"""Limits on the p99 of the time between tokens, in decode steps, as in the Sarathi-Serve paper."""
_LONGEST_WAIT_S = 2.0
"""Limit on the median time to the first token. It keeps overload out of the capacity."""

_TIGHT = replace(COSTS, name="8b-h100-tight", kv_tokens=65_536)
"""A device whose KV cache holds about 50 of its 256 rows."""
PREEMPTIONS = {
    "fcfs": "quire:fcfs",
    "priority, no preemption": "quire:priority+policy_preemption=off",
    "priority, victims by lowest priority": "quire:priority+victim_rule=lowest_priority",
    "priority, youngest victims": "quire:priority+victim_rule=youngest",
    "priority, fewest victims": "quire:priority+victim_rule=fewest",
    "priority, fewest victims, difference of 2": "quire:priority+victim_rule=fewest+preempt_priority_difference=2",
    "priority, guaranteed_no_evict": "quire:priority+capacity=guaranteed_no_evict",
}
"""Rules for preemption."""
POLICIES = ("fcfs", "balanced", "sjf", "slo", "priority", "edf", "fair")


def _serve(scheduler: str, workload: Workload, costs: Costs = COSTS) -> Run:
    setup = Setup(costs=costs, num_workers=1, in_flight=1)
    # These studies do not report CPU time, and the clock for it is slow on some machines.
    engine = QuireEngine(quire_config(parse(scheduler), setup), costs, 1, cpu_clock=time.perf_counter)
    return run(engine, workload, costs)


def _drawn(name: str, load: float, seconds: float, seed: int, costs: Costs = COSTS) -> OpenLoop:
    return DRAWN[name](Drawing(seconds=seconds, load=load, costs=costs, num_workers=1, seed=seed))


def _poisson(rate: float, count: int, seed: int, lengths: Callable[[random.Random], tuple[int, int]]) -> OpenLoop:
    """Return Poisson arrivals whose prompt and output tokens a function draws."""
    rng = random.Random(seed)
    jobs, at = [], 0.0
    for number in range(count):
        at += rng.expovariate(rate)
        prompt, outputs = lengths(rng)
        jobs.append(Job(at=at, prompt=(Piece(_PROMPTS + number, prompt),), outputs=Piece(_OUTPUTS + number, outputs)))
    return OpenLoop(name="poisson", load=rate, jobs=jobs)


def _gaps(outcome: Run) -> list[float]:
    return [after - before for each in outcome.served for before, after in pairwise(each.tokens)]


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 4)


def windows() -> Values:
    """Return the mean TTFT and latency under dynamic batching for several windows, and under continuous batching."""
    lengths = (_WINDOW_PROMPT, _WINDOW_OUTPUT)
    rate = capacity(replace(COSTS, max_num_seqs=_WINDOW_ROWS), *lengths)
    schedulers = {
        "continuous": f"quire:fcfs+max_num_seqs={_WINDOW_ROWS}",
        **{
            f"{window} ms": f"quire:fcfs+batching=dynamic+max_batch_size={_WINDOW_ROWS}+max_wait_ms={window}"
            for window in WINDOWS_MS
        },
    }
    found: Values = {}
    for load in WINDOW_LOADS:
        rows: Values = {}
        for name, scheduler in schedulers.items():
            result = metrics(_serve(scheduler, _poisson(load * rate, _WINDOW_REQUESTS, 1, lambda _: lengths)))
            rows[name] = {
                "ttft_mean_s": round(result["ttft_s"]["mean"], 4),
                "e2e_p99_s": round(result["e2e_s"]["p99"], 4),
            }
        found[f"{load:g}"] = rows
    return {"rows": _WINDOW_ROWS, "requests": _WINDOW_REQUESTS, "by_load": found}


def prefixes() -> Values:
    """Return what the prefix cache gains on shared system prompts and on agent sessions."""
    found: Values = {}
    for cache in ("off", "hash", "radix"):
        for name in ("prefixes", "agents"):
            results = []
            for seed in SEEDS[: 1 if name == "agents" else len(SEEDS)]:
                workload = Agents(users=16, sessions=32, seed=seed) if name == "agents" else _drawn(name, 0.8, 30, seed)
                results.append(metrics(_serve(f"quire:fcfs+prefix_cache={cache}", workload)))
            found[f"{name}, {cache}"] = {
                "hit_share": _median(each["prefix_hit_share"] for each in results),
                "hit_bound": _median(each["prefix_hit_bound"] for each in results),
                "ttft_mean_s": _median(each["ttft_s"]["mean"] for each in results),
                "out_tok_per_s": _median(each["out_tok_per_s"] for each in results),
            }
    return found


def chunks() -> Values:
    """Return the longest gap between two tokens of 32 decoding requests when one prompt of 4,096 tokens arrives."""
    found: Values = {}
    for name, budget in BUDGETS.items():
        decodes = [
            Job(at=0.0, prompt=(Piece(_PROMPTS + number, 128),), outputs=Piece(_OUTPUTS + number, 400))
            for number in range(32)
        ]
        late = Job(at=2.0, prompt=(Piece(_PROMPTS + 99, 4096),), outputs=Piece(_OUTPUTS + 99, 16))
        workload = OpenLoop(name="long prompt", load=1.0, jobs=[*decodes, late])
        outcome = _serve(_with_budget(budget), workload)
        others = [each for each in outcome.served if each.job is not late]
        (own,) = (each for each in outcome.served if each.job is late)
        found[name] = {
            "longest_gap_s": round(max(b - a for each in others for a, b in pairwise(each.tokens[1:])), 4),
            "ttft_of_the_prompt_s": round(ttft_s(own), 4),
        }
    return found


def _with_budget(budget: int) -> str:
    return f"quire:fcfs+max_num_batched_tokens={budget}+itl_target_ms=0"


def _chat(rng: random.Random) -> tuple[int, int]:
    """Return lengths like those of openchat_sharegpt4 in the Sarathi-Serve paper: medians 1,730 and 415."""
    prompt = min(8192, max(16, round(rng.lognormvariate(7.456, 0.93))))
    return prompt, min(2048, max(8, round(rng.lognormvariate(6.028, 0.55))))


def decode_step_s() -> float:
    """Return the time of a decode step with 32 rows of 4,096 tokens, to which the limits refer."""
    return COSTS.seconds(Work(0, 32, 32 * 4096, 0))


def latency_limits() -> Values:
    """Return the highest load within a limit on p99 of the time between tokens, for whole prompts and chunks.

    Capacity as in the Sarathi-Serve paper: also, the median time to the first token is at most 2 s.
    """
    step, rate = decode_step_s(), capacity(COSTS, 2300, 480)
    found: Values = {"decode_step_s": round(step, 4), "requests_per_s_at_1": round(rate, 3)}
    for name, budget in BUDGETS.items():
        gaps = functools.cache(functools.partial(_gap_at, budget, rate))
        found[name] = {
            limit: _highest(functools.partial(_is_within, gaps, steps * step))
            for limit, steps in (("strict", STRICT), ("relaxed", RELAXED))
        }
    return found


def _is_within(gap_at: Callable[[float], float], most_s: float, load: float) -> bool:
    return gap_at(load) <= most_s


def _gap_at(budget: int, rate: float, load: float) -> float:
    """Return p99 of the time between tokens at a load; infinity if the first tokens take too long."""
    outcome = _serve(_with_budget(budget), _poisson(load * rate, 200, 1, _chat))
    first = quantile([ttft_s(each) for each in outcome.served], 0.5) or 0.0
    return (quantile(_gaps(outcome), 0.99) or 0.0) if first <= _LONGEST_WAIT_S else float("inf")


def _highest(is_within: Callable[[float], bool]) -> float:
    """Return the highest tried load within a limit, by bisection; 0 if none is."""
    low, high = -1, len(_LOADS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(_LOADS[middle]) else (low, middle)
    return _LOADS[low] if low >= 0 else 0.0


def preemptions() -> Values:
    """Return preemptions and urgent requests in time for several rules, in a KV cache too small for the rows."""
    found: Values = {"kv_tokens": _TIGHT.kv_tokens}
    for name, scheduler in PREEMPTIONS.items():
        results = [metrics(_serve(scheduler, _drawn("priorities", 1.3, 40, seed, _TIGHT), _TIGHT)) for seed in SEEDS]
        found[name] = {
            "requests": _median(each["requests"] for each in results),
            "preemptions": _median(each["preemptions"] for each in results),
            "urgent_in_time": _median(each["groups"]["urgent"]["goodput"] for each in results),
            "urgent_ttft_p99_s": _median(each["groups"]["urgent"]["ttft_s"]["p99"] for each in results),
            "batch_e2e_p99_s": _median(each["groups"]["batch"]["e2e_s"]["p99"] for each in results),
            "out_tok_per_s": _median(each["out_tok_per_s"] for each in results),
        }
    return found


def tails() -> Values:
    """Return mean and p99 latencies of all requests under each policy, in bursts at 0.9 of the capacity."""
    found: Values = {}
    for policy in POLICIES:
        results = [metrics(_serve(f"quire:{policy}", _drawn("bursts", 0.9, 70, seed))) for seed in SEEDS]
        found[policy] = {
            "e2e_mean_s": _median(each["e2e_s"]["mean"] for each in results),
            "e2e_p99_s": _median(each["e2e_s"]["p99"] for each in results),
            "ttft_mean_s": _median(each["ttft_s"]["mean"] for each in results),
            "ttft_p99_s": _median(each["ttft_s"]["p99"] for each in results),
        }
    return found


def rows(sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)) -> Values:
    """Return throughput and time per token by the number of rows, with enough users to fill them."""
    found: Values = {}
    for size in sizes:
        jobs = [
            Job(at=0.0, prompt=(Piece(_PROMPTS + number, 512),), outputs=Piece(_OUTPUTS + number, 256))
            for number in range(4 * size)
        ]
        result = metrics(_serve(f"quire:fcfs+max_num_seqs={size}", OpenLoop(name="users", load=size, jobs=jobs)))
        found[str(size)] = {
            "out_tok_per_s": round(result["out_tok_per_s"], 1),
            "tpot_p99_s": round(result["tpot_s"]["p99"], 4),
            "device_busy_share": round(result["device_busy_share"], 4),
        }
    return found
