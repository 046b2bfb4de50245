"""Reports as one self-contained page: tables and charts (inline SVG), without scripts and external files. Pure."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np

from measure.load.outcomes import Outcome
from measure.load.report import RATES, Report, describe_server, number, spreads
from measure.load.run import token_rates
from measure.load.svg import Segment, Series, lines, strips
from measure.spread import Spread

STRIPS = 60
"""Maximum number of requests in the Gantt chart."""
_POINTS = 200
"""Number of points on a distribution curve."""
_STEPS = 2000
"""Maximum number of points on a step curve."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin: 0.5em 0; } th, td { padding: 0.2em 0.8em; border-bottom: 1px solid #ddd; }
th { text-align: left; font-weight: 600; } td { text-align: right; font-variant-numeric: tabular-nums; }
.words td { text-align: left; vertical-align: top; } .words th { vertical-align: top; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; } .warning { background: #fff3cd; padding: 0.5em 1em; }
"""


def page(report: Report) -> str:
    """Return the page of a benchmark."""
    figures = report.figures
    intervals, repeated = report.intervals(), len(report.runs) > 1
    counts = [
        ("requests", f"{figures.requests}"),
        ("answered", f"{figures.done}"),
        ("failed", f"{figures.failed}"),
        ("cancelled", f"{figures.cancelled}"),
        ("prompt tokens", f"{figures.prompt_tokens} ({figures.cached_tokens} cached)"),
        ("output tokens", f"{figures.output_tokens}"),
        *(
            (title, number(intervals[name].mean) + (f" ± {number(intervals[name].half_width)}" if repeated else ""))
            for title, name, _ in RATES
        ),
    ]
    outcomes = [each for each in report.runs[-1].outcomes if each.counted]
    charts = [
        _cdf("Time to first token", [each.ttft_s for each in outcomes if each.ttft_s is not None]),
        _cdf("Time between tokens (ITL)", [gap for each in outcomes for gap in each.gaps_s]),
        _cdf("Time per output token (TPOT)", [each.tpot_s for each in outcomes if each.tpot_s is not None]),
        _cdf("End to end", [each.e2e_s for each in outcomes]),
        lines("Output over time", "s", "tokens/s", [Series("", token_rates(report.runs[-1].outcomes))]),
        _in_flight(report.runs[-1].outcomes),
    ]
    limits = report.slo.describe()
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.load)}" + (f"; goodput: {escape(limits)}" if limits else "") + "</p>",
        *(f'<p class="warning">{escape(text)}</p>' for text in report.warnings()),
        "<h2>Counts and rates</h2>",
        table(["", ""], counts),
        "<h2>Latencies, ms, from the intended start</h2>",
        table(
            ["", "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"],
            [(name, *_cells(spread)) for name, spread in spreads(figures)],
        ),
    ]
    if figures.failures:
        body += ["<h2>Failures</h2>", table(["kind", "requests"], [(k, str(v)) for k, v in figures.failures.items()])]
    servers = [run for run in report.runs if run.server is not None]
    if servers:
        body += ["<h2>Server</h2>", *(f"<p>{escape(describe_server(run))}</p>" for run in servers)]
    if len(report.runs) > 1:
        body += [f"<p>Charts show the last of {len(report.runs)} repeats.</p>"]
    body += ["<h2>Plots</h2>", '<div class="charts">', *charts, "</div>", "<h2>Requests</h2>", gantt(outcomes)]
    return document(report.title, body)


def document(title: str, body: Sequence[str]) -> str:
    """Return a page with the common style."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, of_words: bool = False) -> str:
    """Return a table. The first column contains names, the others numbers or words."""
    titles = "".join(f"<th>{escape(each)}</th>" for each in head) if any(head) else ""
    cells = ["".join([f"<th>{escape(row[0])}</th>", *(f"<td>{escape(each)}</td>" for each in row[1:])]) for row in rows]
    kind = ' class="words"' if of_words else ""
    return f"<table{kind}>" + "".join(f"<tr>{each}</tr>" for each in ([titles] if titles else []) + cells) + "</table>"


def gantt(outcomes: Sequence[Outcome]) -> str:
    """Return the chart of requests over time. If there are many, an evenly spaced selection is shown."""
    picked = [outcomes[round(at)] for at in np.linspace(0, len(outcomes) - 1, min(STRIPS, len(outcomes)))]
    begin = min((each.intended_s for each in picked), default=0.0)
    rows = []
    for each in picked:
        first = each.message_times_s[0] if each.message_times_s else each.ended_s
        times = [each.intended_s, each.sent_s, first, each.ended_s]
        rows.append([Segment(a - begin, b - begin, kind) for kind, (a, b) in enumerate(pairwise(times))])
    title = f"{len(picked)} of {len(outcomes)} requests"
    return strips(title, "s", ("generator late", "waiting", "receiving tokens"), rows)


def _cdf(title: str, values: Sequence[float]) -> str:
    """Return the cumulative distribution of values up to their 99.9th percentile."""
    shares = np.linspace(0, 99.9, _POINTS)
    points = list(zip((1000 * np.percentile(values, shares)).tolist(), shares.tolist(), strict=True)) if values else []
    return lines(title, "ms", "% of values", [Series("", points)], top=100.0)


def _in_flight(outcomes: Sequence[Outcome]) -> str:
    changes = sorted([(each.sent_s, 1) for each in outcomes] + [(each.ended_s, -1) for each in outcomes])
    points: list[tuple[float, float]] = []
    count = 0
    for time_s, change in changes:
        points.append((max(time_s, 0.0), float(count)))
        count += change
        points.append((max(time_s, 0.0), float(count)))
    if len(points) > _STEPS:  # Steps this narrow would not be visible.
        points = points[:: len(points) // (_STEPS // 4)]
    return lines("Requests in flight", "s", "requests", [Series("", points)])


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.p999, spread.max)
    return [str(spread.count), *(number(1000 * value) if spread.count else "-" for value in values)]
