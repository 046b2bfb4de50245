"""Report of `quire bench strategies`: table, JSON, HTML, and the tables of docs/strategies.md. Pure."""

import html as markup
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

from measure.load import html as page
from measure.load.search import pareto_front
from measure.load.svg import Segment, Series, bars, lines, strips
from measure.strategies import cases
from measure.strategies.claims import claims

Row = dict[str, Any]
"""One result, in the form that `measure` returns and the JSON file contains."""

PLOTTED = ("50-100-200-500", "10-50-500", "half-short")
"""Workloads whose slots are drawn."""
_IN_BARS = (cases.FOUR, cases.UNIFORM, cases.EXPONENTIAL, cases.HALVES)
"""Workloads whose gains are drawn."""
_MOST_BY_OTHERS = 0.05
"""Times are reported as unreliable if other programs used more than this share of the CPU time."""
_MOST_STEPS = 2000
"""Maximum number of steps drawn."""
_HEADER = (
    "workload", "strategy", "slots", "steps", "fewest", "x steps", "bound", "tokens/s", "x tokens/s", "p50 s", "p99 s",
    "idle slots",
)  # fmt: skip


def document(results: Sequence[Row], by_others: float | None) -> Row:
    """Return the JSON document: the results, the command and the machine.

    Args:
        results: all results.
        by_others: fraction of CPU time used by other programs during the run; None if unknown.
    """
    return {
        "command": "quire bench strategies",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "cpu_share_of_other_programs": by_others,
        "results": list(results),
    }


def origin(document: Row) -> str:
    """Return where the numbers were measured, and whether the machine had other work."""
    text = f"Measured by `{document['command']}` on {document['machine']}."
    share = document["cpu_share_of_other_programs"]
    if share is None:
        return f"{text} It is not known how much other programs used the machine meanwhile."
    if share <= _MOST_BY_OTHERS:
        return f"{text} Other programs used {share:.1%} of the processors' time meanwhile."
    return (
        f"{text} Other programs used {share:.0%} of the processors' time meanwhile, so compare steps, idle slots and"
        " bounds, which hardly depend on it, and no times."
    )


def to_json(document: Row) -> str:
    """Return the document as JSON with one result per line."""
    rows = ",\n".join(json.dumps(row) for row in document["results"])
    head = json.dumps({name: value for name, value in document.items() if name != "results"}, indent=1)
    return f'{head[:-2]},\n "results": [\n{rows}\n]}}\n'


def strategy_name(row: Row) -> str:
    """Return the strategy, with what distinguishes the run from others with the same workload."""
    more = [row["policy"]] if row["policy"] != "fcfs" else []
    if row["workload"] == cases.TIGHT.name:
        more.append(row["capacity"])
    if row["workload"] == cases.LONG.name:
        more.append("chunks of 128" if row["step_tokens"] == cases.CHUNKED_TOKENS else "whole prompt in a step")
    if row["memory"] != "equal slots":
        more.append(row["memory"])
    return f"{row['strategy']} ({', '.join(more)})" if more else row["strategy"]


def cells(row: Row, results: Sequence[Row]) -> tuple[str, ...]:
    """Return a result as table cells. Factors are relative to `static-held` with the same workload."""
    static = [each for each in results if each["workload"] == row["workload"] and each["strategy"] == "static-held"]
    is_low_load = row["workload"] == cases.LOW_LOAD.name
    steps = f"{static[0]['steps'] / row['steps']:.2f}" if static and not is_low_load else "-"
    speed = f"{row['out_tok_per_s'] / static[0]['out_tok_per_s']:.2f}" if static else "-"
    return (
        row["workload"],
        strategy_name(row),
        str(row["slots"]),
        f"{row['steps']:,}",
        f"{row['fewest_steps']:,}" if row["fewest_steps"] else "-",
        steps,
        f"{row['bound']:.2f}" if static and row["bound"] else "-",
        f"{row['out_tok_per_s']:,.0f}",
        speed,
        f"{row['e2e_s']['p50']:.2f}",
        f"{row['e2e_s']['p99']:.2f}",
        "-" if is_low_load else f"{row['idle_slot_share']:.1%}",
    )


def table(results: Sequence[Row]) -> str:
    """Return the results as a table for a terminal."""
    rows = [_HEADER, *(cells(row, results) for row in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return "\n".join(lines)


def markdown_table(results: Sequence[Row]) -> str:
    """Return the results as a Markdown table."""
    rows = [_HEADER, ("---",) * len(_HEADER), *(cells(row, results) for row in results)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plots(results: Sequence[Row]) -> dict[str, str]:
    """Return the charts as SVG, by name. Workloads that did not run have no chart."""
    found = {}
    for name in PLOTTED:
        held, continuous = (_find(results, name, strategy) for strategy in ("static-held", "continuous"))
        if held and continuous:
            found[name] = _gantt(held, continuous)
    groups = [
        (workload.name, held, continuous)
        for workload in _IN_BARS
        if (held := _find(results, workload.name, "static-held"))
        and (continuous := _find(results, workload.name, "continuous"))
    ]
    if groups:
        series = [
            ("bound", [held["bound"] for _, held, _ in groups]),
            ("steps", [held["steps"] / continuous["steps"] for _, held, continuous in groups]),
            ("tokens/s", [continuous["out_tok_per_s"] / held["out_tok_per_s"] for _, held, continuous in groups]),
        ]
        title = "Continuous against static-held at equal slots"
        found["gain"] = bars(title, "factor", [name for name, _, _ in groups], series)
    return found


def _in_pareto(results: Sequence[Row]) -> list[str]:
    """Return the workloads with more than one run to compare."""
    counts = Counter(row["workload"] for row in results)
    return [name for name, count in counts.items() if count > 2]


def _pareto(workload: str, results: Sequence[Row]) -> str:
    """Return a chart of tokens per second against p99 latency, for each run of a workload."""
    rows = [row for row in results if row["workload"] == workload]
    places = [(row["e2e_s"]["p99"], row["out_tok_per_s"]) for row in rows]
    labels = [f"{strategy_name(row)}, {row['slots']}" for row in rows]
    front = [places[index] for index in pareto_front(places, less_x_is_better=True)]
    return lines(
        f"{workload}: strategy, slots",
        "end to end, p99, s",
        "output tokens/s",
        [Series("runs", places, labels=labels, is_line=False), Series("front", front, labels=[""] * len(front))],
    )


def _find(results: Sequence[Row], workload: str, strategy: str) -> Row | None:
    for row in results:
        if (row["workload"], row["strategy"], row["memory"], row["policy"]) == (
            workload, strategy, "equal slots", "fcfs",
        ):  # fmt: skip
            return row
    return None


def _gantt(held: Row, continuous: Row) -> str:
    """Return the slots in a static and in a continuous run, one above the other."""
    slots = held["slots"]
    rows: list[list[Segment]] = [[] for _ in range(2 * slots + 1)]
    batch_ends = _batch_ends(held)
    for run, offset in ((held, 0), (continuous, slots + 1)):
        for number, (slot, _, begin, end) in enumerate(run["gantt"]):
            row = rows[offset + slot]
            if begin >= _MOST_STEPS:
                continue
            row.append(Segment(begin, min(end, _MOST_STEPS), number % 2))
            last = next((each for each in batch_ends if each >= end), end) if run is held else end
            if last > end:
                row.append(Segment(end, min(last, _MOST_STEPS), 2))
    title = f"{held['workload']}: static (above) and continuous (below), {slots} slots"
    return strips(title, "step", ("request", "next request", "held after its end"), rows)


def _batch_ends(held: Row) -> list[int]:
    """Return the steps after which a static run began a new batch. No request runs across them."""
    found, latest = [], 0
    for _, _, begin, end in sorted(held["gantt"], key=lambda bar: bar[2]):
        if latest and begin >= latest:
            found.append(latest)
        latest = max(latest, end)
    return [*found, latest]


def html(document: Row) -> str:
    """Return a self-contained HTML page."""
    results = document["results"]
    told = [(each.claim, each.claimed, each.verdict, each.measured, each.why) for each in claims(results)]
    body = [
        "<h1>Batching strategies</h1>",
        f"<p>{markup.escape(origin(document))}</p>",
        "<p>Factors (x) are relative to static-held of the same workload; the bound is what the lengths allow.</p>",
        '<div class="charts">',
        *plots(results).values(),
        '</div><h2>Claims</h2><div class="words">',
        page.table(("claim", "claimed", "verdict", "measured here", "why"), told),
        "</div><h2>All runs</h2>",
        page.table(_HEADER, [cells(row, results) for row in results]),
        "<h2>Throughput against latency</h2>",
        "<p>The front has the runs that no other run beats in both.</p>",
        '<div class="charts">',
        *(_pareto(name, results) for name in _in_pareto(results)),
        "</div>",
    ]
    return page.document("Batching strategies", body)
