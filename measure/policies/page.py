"""The results of a campaign as one page: a table for each workload and load, and the metrics in which a peer is better.

With several seeds a cell has the median and the range. Pure; without scripts and external files.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from measure.load.html import document, table
from measure.policies.metrics import Result
from measure.policies.report import versions

Setting = tuple[str, float, str, int, int]
"""Workload, load, costs, workers and steps in flight in a run."""


@dataclass(frozen=True, slots=True)
class Column:
    """A metric of the page."""

    title: str
    path: tuple[str, ...]
    digits: int = 2
    factor: float = 1.0
    best: Callable[[Iterable[float]], float] | None = None
    """`min` or `max`; None if no value is better than another."""

    def values(self, results: Iterable[Result]) -> list[float]:
        """Return the metric of each run that has it."""
        found = []
        for result in results:
            value: Any = result
            for key in self.path:
                value = value[key]
            if value is not None:
                found.append(value * self.factor)
        return found

    def cell(self, results: Sequence[Result]) -> str:
        """Return the median over the runs, and their range."""
        values = self.values(results)
        if not values:
            return "-"
        median = f"{statistics.median(values):,.{self.digits}f}"
        if len(values) == 1:
            return median
        return f"{median} ({min(values):,.{self.digits}f} … {max(values):,.{self.digits}f})"


COLUMNS = (
    Column("TTFT p50 s", ("ttft_s", "p50"), best=min),
    Column("TTFT mean s", ("ttft_s", "mean"), best=min),
    Column("TTFT p99 s", ("ttft_s", "p99"), best=min),
    Column("short prompts: TTFT p99 s", ("short_prompts", "ttft_s", "p99"), best=min),
    Column("later turns: TTFT p95 s", ("later_turn_ttft_s", "p95"), best=min),
    Column("per token p50 ms", ("tpot_s", "p50"), 1, 1000, best=min),
    Column("per token p99 ms", ("tpot_s", "p99"), 1, 1000, best=min),
    Column("longest gap p99 s", ("longest_gap_s", "p99"), best=min),
    Column("in targets %", ("goodput",), 1, 100, best=max),
    Column("cache hits %", ("prefix_hit_share",), 1, 100, best=max),
    Column("tokens/s", ("out_tok_per_s",), 0, best=max),
    Column("difference of service", ("service_difference",), 0, best=min),
    Column("preemptions", ("preemptions",), 0),
    Column("device busy %", ("device_busy_share",), 0, 100),
    Column("CPU µs/step", ("scheduler_us_per_step",), 0, best=min),
)
_NOTICEABLE = 0.02
"""Relative difference above which a loss is listed."""


def page(results: Sequence[Result]) -> str:
    seeds = sorted({result["seed"] for result in results})
    body = [
        "<h1>Scheduling policies in virtual time</h1>",
        f"<p>{', '.join(versions(results))}; seeds {', '.join(map(str, seeds))}. Same jobs, same devices, same costs of"
        " steps for every scheduler. Cells: median over the seeds (range).</p>",
    ]
    for setting, runs in by_setting(results).items():
        workload, load, costs, workers, in_flight = setting
        columns = [column for column in COLUMNS if any(column.values(each) for each in runs.values())]
        body.append(
            f"<h2>{workload}, load {load:g}: {costs}, {workers} workers, {in_flight} steps in flight, "
            f"{next(iter(runs.values()))[0]['requests']} requests</h2>"
        )
        rows = [[name, *(column.cell(each) for column in columns)] for name, each in runs.items()]
        body.append(table(["scheduler", *(column.title for column in columns)], rows))
        lost = losses(runs)
        if lost:
            body.append(table(["where a peer is better than Quire", ""], lost, of_words=True))
    return document("Scheduling policies", body)


def by_setting(results: Iterable[Result]) -> dict[Setting, dict[str, list[Result]]]:
    """Return the runs grouped by setting, then by scheduler."""
    found: dict[Setting, dict[str, list[Result]]] = {}
    for each in results:
        setting = (each["workload"], each["load"], each["costs"], each["workers"], each["in_flight"])
        found.setdefault(setting, {}).setdefault(each["scheduler"], []).append(each)
    return found


def losses(runs: dict[str, list[Result]]) -> list[tuple[str, str]]:
    """Return the metrics in which the best of Quire's policies is noticeably worse than the best peer, by median."""
    found = []
    for column in COLUMNS:
        if column.best is None:
            continue
        medians = {name: statistics.median(values) for name, each in runs.items() if (values := column.values(each))}
        own = {name: value for name, value in medians.items() if name.startswith("quire:")}
        others = {name: value for name, value in medians.items() if name not in own}
        if not own or not others:
            continue
        mine, theirs = column.best(own.values()), column.best(others.values())
        is_better = column.best((mine, theirs)) == theirs and mine != theirs
        if is_better and abs(mine - theirs) > _NOTICEABLE * max(abs(mine), abs(theirs)):
            peer = next(name for name, value in others.items() if value == theirs)
            found.append((column.title, f"{peer} {theirs:,.{column.digits}f}, Quire {mine:,.{column.digits}f}"))
    return found
