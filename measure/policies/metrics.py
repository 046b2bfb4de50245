"""Metrics of a run, computed from token arrival times. The computation is the same for every scheduler."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from measure.policies.arena import Run, Served

TTFT_TARGET_S, PREFILL_RATE, TPOT_TARGET_S = 2.0, 8000.0, 0.05
"""Default targets: the first token within 2 s plus the prompt's time at 8,000 tokens/s, then 50 ms per token."""
SHORT_TOKENS = 512
"""Maximum number of new tokens in a short prompt. Tokens that an earlier job contained do not count."""
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service weights of prompt tokens and generated tokens, as in the VTC paper."""

Result = dict[str, Any]
"""A JSON object."""


def ttft_s(served: Served) -> float:
    """Return the time to the first token."""
    return served.tokens[0] - served.job.at


def tpot_s(served: Served) -> float:
    """Return the mean time per token after the first one."""
    return (served.tokens[-1] - served.tokens[0]) / (len(served.tokens) - 1)


def meets_targets(served: Served) -> bool:
    """Return whether a job was served within its targets, or within the default ones."""
    job = served.job
    if served.refusal:
        return False
    first = job.ttft_target_s if job.ttft_target_s is not None else TTFT_TARGET_S + job.num_prompt / PREFILL_RATE
    each = job.tpot_target_s if job.tpot_target_s is not None else TPOT_TARGET_S
    return ttft_s(served) <= first and (job.num_outputs < 2 or tpot_s(served) <= each)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that covers this fraction of the values (nearest rank); None without values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else None


def metrics(run: Run) -> Result:
    """Return a run's metrics, as described in docs/arena.md."""
    done = [each for each in run.served if not each.refusal]
    outputs = sum(len(each.tokens) for each in run.served)
    prompts = sum(each.job.num_prompt for each in done)
    duration = max(run.duration_s, 1e-9)
    found: Result = {
        "requests": len(run.served),
        "refused": len(run.served) - len(done),
        "duration_s": run.duration_s,
        "out_tok_per_s": outputs / duration,
        **latencies(done),
        "goodput": sum(meets_targets(each) for each in run.served) / max(1, len(run.served)),
        "prefix_hit_share": sum(each.cached for each in done) / max(1, prompts),
        "prefix_hit_bound": sum(each.seen for each in done) / max(1, prompts),
        "hit_tokens_by_tier": dict(run.hit_tokens),
        "preemptions": sum(each.preemptions for each in run.served),
        "service_difference": service_difference(run.served),
        "device_busy_share": run.busy_s / duration / run.num_workers,
        "arrivals_busy_share": run.arrivals_busy_s / max(run.arrivals_s, 1e-9) / run.num_workers,
        "steps": run.steps,
        "scheduler_us_per_step": run.cpu_s / max(1, run.steps) * 1e6,
    }
    found["forecasts"] = {
        each.of: {
            "count": each.count,
            "within_p50": each.within_median / max(1, each.count),
            "within_p90": each.within_p90 / max(1, each.count),
        }
        for each in run.forecasts
    }
    short = [each for each in done if each.job.num_prompt - each.seen <= SHORT_TOKENS]
    found["short_prompts"] = {"requests": len(short), **latencies(short)}
    found["groups"] = {
        group: {
            "requests": len(members),
            **latencies([each for each in members if not each.refusal]),
            "goodput": sum(meets_targets(each) for each in members) / len(members),
        }
        for group, members in _groups(run.served).items()
    }
    return found


def latencies(done: Sequence[Served]) -> Result:
    """Return the latency distributions for served jobs."""
    first = [ttft_s(each) for each in done]
    later = [ttft_s(each) for each in done if each.job.turn]
    per_token = [tpot_s(each) for each in done if len(each.tokens) > 1]
    gaps = [max(after - before for before, after in pairwise(each.tokens)) for each in done if len(each.tokens) > 1]
    whole = [each.ended - each.job.at for each in done]
    sessions = _sessions(done)
    return {
        "ttft_s": _distribution(first, mean=True, shares=(50, 90, 99)),
        "later_turn_ttft_s": _distribution(later, shares=(50, 95)),
        "tpot_s": _distribution(per_token, shares=(50, 99)),
        "longest_gap_s": _distribution(gaps, shares=(50, 99)),
        "e2e_s": _distribution(whole, mean=True, shares=(50, 99)),
        "session_s": _distribution(sessions, mean=True, shares=(95,)),
    }


def service_difference(served: Sequence[Served]) -> float | None:
    """Return the largest difference in service between two tenants over any interval in which both are backlogged.

    A tenant is backlogged while one of its requests has no first token. Service is measured in weighted tokens. None if
    there are fewer than two tenants.
    """
    tenants = sorted({each.job.tenant for each in served})
    pairs = [(one, other) for at, one in enumerate(tenants) for other in tenants[at + 1 :]]
    return max((_difference(served, one, other) for one, other in pairs), default=None)


def _difference(served: Sequence[Served], one: str, other: str) -> float:
    """Return the largest rise or fall of the difference between two tenants within a common backlog."""
    events: list[
        tuple[float, int, int, float]
    ] = []  # Time, order, tenant, service. An infinite service marks a new request.
    for each in served:
        if each.job.tenant not in (one, other):
            continue
        tenant = int(each.job.tenant == other)
        events.append((each.job.at, 0, tenant, float("inf")))
        if each.refusal and not each.tokens:
            events.append((each.ended, 1, tenant, 0.0))
        for index, at in enumerate(each.tokens):
            first = PROMPT_WEIGHT * each.job.num_prompt if index == 0 else 0.0
            events.append((at, 1 if index == 0 else 2, tenant, first + OUTPUT_WEIGHT))
    waiting = [0, 0]
    difference = lowest = highest = largest = 0.0
    for _, order, tenant, service in sorted(events):
        had_backlog = all(waiting)
        if order == 0:
            waiting[tenant] += 1
        else:
            difference += service if tenant else -service
            waiting[tenant] -= order == 1
        if had_backlog:
            lowest, highest = min(lowest, difference), max(highest, difference)
            largest = max(largest, highest - lowest)
        if not (had_backlog and all(waiting)):
            lowest = highest = difference
    return largest


def _groups(served: Iterable[Served]) -> dict[str, list[Served]]:
    groups: dict[str, list[Served]] = {}
    for each in served:
        if each.job.group:
            groups.setdefault(each.job.group, []).append(each)
    return dict(sorted(groups.items()))


def _sessions(done: Iterable[Served]) -> list[float]:
    """Return each session's duration, from its first request to its last end."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in done:
        if (session := each.job.session) >= 0:
            begins[session] = min(begins.get(session, each.job.at), each.job.at)
            ends[session] = max(ends.get(session, each.ended), each.ended)
    return [ends[session] - begin for session, begin in begins.items()]


def _distribution(values: Sequence[float], *, shares: Sequence[int], mean: bool = False) -> dict[str, float | None]:
    found = {f"p{share}": quantile(values, share / 100) for share in shares}
    return found | {"mean": sum(values) / len(values) if values else None} if mean else found
