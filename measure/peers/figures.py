"""Computes the numbers by which peers are compared, from token times."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from measure.peers.workloads import LONG_ARRIVES_S, Workload

HIGHER_IS_BETTER = {"out_tok_per_s": True, "decode_tok_per_s": True, "max_gap_s": False, "long_ttft_s": False}
HEADLINE = {"W1": "out_tok_per_s", "W2": "decode_tok_per_s", "W3": "out_tok_per_s", "W3w": "out_tok_per_s",
            "W4": "max_gap_s", "D1": "decode_tok_per_s", "D16": "decode_tok_per_s"}  # fmt: skip
"""The metric that each workload reports."""

Figures = dict[str, float]


class DifferentWorkError(Exception):
    """A peer did not generate the requested tokens, so its time is meaningless."""


def figures(workload: Workload, times: Sequence[Sequence[float]]) -> Figures:
    """Return the metrics of one run.

    Args:
        workload: the workload that was served.
        times: token times in seconds since the start, for each request that is not `prime`, in order.

    Raises:
        DifferentWorkError: tokens are missing or too many, or the requests never decoded at the same time.
    """
    timed = [request for request in workload.requests if not request.prime]
    if [len(each) for each in times] != [request.max_tokens for request in timed]:
        raise DifferentWorkError(f"{workload.name}: asked for {[r.max_tokens for r in timed]} tokens, "
                                 f"got {[len(each) for each in times]}")  # fmt: skip
    wall_s = max(each[-1] for each in times)
    result = {"out_tok_per_s": sum(map(len, times)) / wall_s, "wall_s": wall_s}
    result["ttft_p50_s"] = statistics.median(
        each[0] - request.arrive_s for each, request in zip(times, timed, strict=True)
    )
    if HEADLINE.get(workload.name) == "decode_tok_per_s":
        result["decode_tok_per_s"] = _decode_speed(workload.name, times)
    if workload.name == "W4":
        *decoders, long = times
        gaps = [(after, after - before) for each in decoders for before, after in pairwise(each)]
        result["max_gap_s"] = max(gap for at, gap in gaps if at > LONG_ARRIVES_S)
        result["long_ttft_s"] = long[0] - LONG_ARRIVES_S
    return result


def _decode_speed(name: str, times: Sequence[Sequence[float]]) -> float:
    """Return tokens/s from the last first token to the first last token: while all requests decode."""
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if begin >= end:
        raise DifferentWorkError(f"{name}: no time when all requests decoded; the prompts took too long")
    return sum(begin < at <= end for each in times for at in each) / (end - begin)


@dataclass(frozen=True, slots=True)
class Row:
    """One peer on one workload: a metric's median and range over the rounds, and Quire's ratio to it."""

    workload: str
    figure: str
    peer: str
    median: float
    low: float
    high: float
    ratio: float
    """Factor by which Quire's median is better; 1 for Quire itself."""


def compare(runs: Mapping[str, Mapping[str, Sequence[Figures]]], us: str = "quire") -> list[Row]:
    """Return the rows for the headline metrics.

    Args:
        runs: by workload and peer: the numbers of each round.
        us: the peer that the others are compared with.
    """
    rows = []
    for workload, by_peer in runs.items():
        shown = [HEADLINE[workload], "long_ttft_s", "out_tok_per_s"] if workload == "W4" else [HEADLINE[workload]]
        for figure in shown:
            medians = {
                peer: statistics.median(each[figure] for each in each_round) for peer, each_round in by_peer.items()
            }
            for peer, each_round in by_peer.items():
                values = [each[figure] for each in each_round]
                ratio = float("nan")
                if us in medians:
                    ratio = medians[us] / medians[peer] if HIGHER_IS_BETTER[figure] else medians[peer] / medians[us]
                rows.append(Row(workload, figure, peer, medians[peer], min(values), max(values), ratio))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a printable table."""
    lines = [f"{'workload':9}{'figure':18}{'peer':16}{'median':>9}  {'range':>19}  {'Quire is':>9}"]
    lines += [
        f"{row.workload:9}{row.figure:18}{row.peer:16}{row.median:9.2f}  {row.low:8.2f} .. {row.high:7.2f}"
        f"  {row.ratio:8.2f}x"
        for row in rows
    ]
    return "\n".join(lines)
