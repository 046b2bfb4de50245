"""Rules that suggest settings, each with its reason, from the measurements of a sweep. Pure.

The rules use measurements of one workload on one server. They suggest what to change and why. Only a new measurement
shows the effect.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from measure.load.figures import Figures, Slo
from measure.load.server import ServerFigures


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One setting of `quire serve`."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one load."""

    load: float
    figures: Figures
    server: ServerFigures | None
    is_kept: bool
    in_flight: float
    """Mean number of requests in progress."""


def suggest(points: Sequence[Measured], slo: Slo, *, has_tenants: bool, has_priorities: bool) -> list[Suggestion]:
    """Return settings for the highest load within the limits.

    Args:
        points: the measured loads, in increasing order.
        slo: the limits.
        has_tenants: whether requests have tenants.
        has_priorities: whether requests have priorities.
    """
    kept = [point for point in points if point.is_kept]
    if not kept:
        return []
    best = kept[-1]
    broken = next((point for point in points if not point.is_kept and point.load > best.load), None)
    return [
        _max_num_seqs(best, slo),
        *_batched_tokens(best, broken, slo),
        _policy(best, slo, has_tenants, has_priorities),
    ]


def _max_num_seqs(best: Measured, slo: Slo) -> Suggestion:
    # A Poisson-distributed number of requests in progress exceeds its mean by three standard deviations once in 700
    # times.
    needed = math.ceil(best.in_flight + 3 * math.sqrt(best.in_flight))
    rounded = max(8, 8 * math.ceil(needed / 8))
    return Suggestion(
        "--max-num-seqs",
        str(rounded),
        f"at this load {best.in_flight:.1f} requests were in progress on average, and about {needed} at most;"
        + (
            " a lower limit makes requests wait, a higher one lets more of them share a step, which lengthens ITL"
            if slo.itl_s or slo.tpot_s
            else " a lower limit makes requests wait"
        ),
    )


def _batched_tokens(best: Measured, broken: Measured | None, slo: Slo) -> list[Suggestion]:
    if slo.itl_s is not None and best.figures.itl.p99 > 0.8 * slo.itl_s:
        return [
            Suggestion(
                "--max-num-batched-tokens",
                "half of the present value",
                f"99 % of the gaps are within {1000 * best.figures.itl.p99:.0f} ms, close to the limit of"
                f" {1000 * slo.itl_s:.0f} ms; shorter chunks of prompts make shorter steps (or set --itl-target-ms"
                f" {1000 * slo.itl_s:.0f})",
            )
        ]
    first = broken or best
    if slo.ttft_s is not None and first.figures.ttft.p99 > slo.ttft_s:
        room = "no ITL limit was specified" if slo.itl_s is None else "ITL is well within its limit"
        return [
            Suggestion(
                "--max-num-batched-tokens",
                "twice the present value",
                f"the first token is what breaks the limits (p99 {1000 * first.figures.ttft.p99:.0f} ms at"
                f" {first.load:.3g}), and {room}; larger chunks finish prompts in fewer steps",
            )
        ]
    return []


def _policy(best: Measured, slo: Slo, has_tenants: bool, has_priorities: bool) -> Suggestion:
    server, outputs = best.server, best.figures.outputs
    if has_priorities:
        return Suggestion("--policy", "priority", "the requests have priorities, which other policies ignore")
    if has_tenants:
        return Suggestion("--policy", "fair", "the requests have tenants; fair divides the service between them")
    if server is None or server.waiting is None:
        reason = "whether requests wait is unknown; pass the server's metrics address with --metrics"
        return Suggestion("--policy", "balanced", reason)
    if server.waiting < 0.5:
        return Suggestion(
            "--policy", "balanced", "hardly any request waits at this load, so the order makes no difference"
        )
    if (server.prefix_hit_share or 0.0) > 0.2:
        share = server.prefix_hit_share or 0.0
        reason = f"{share:.0%} of the prompt tokens were cached; lpm starts requests while their prefix is still cached"
        return Suggestion("--policy", "lpm", reason)
    if outputs.mean and outputs.p99 > 4 * outputs.mean:
        reason = (
            "a few outputs are far longer than the others; with sjf, short requests overtake them if clients set"
            " expected_output_tokens"
        )
        return Suggestion("--policy", "sjf", reason)
    if slo.ttft_s is not None or slo.e2e_s is not None:
        reason = "requests wait and have limits; edf serves the most urgent first if clients send these as targets"
        return Suggestion("--policy", "edf", reason)
    return Suggestion("--policy", "balanced", "these results give no reason for another policy")
