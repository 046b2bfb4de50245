"""A sweep: the same workload under growing load, the knee of the curve, and the highest load within the limits."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from measure.load.advice import Measured, Suggestion, suggest
from measure.load.figures import Figures, Slo
from measure.load.html import document, gantt, table
from measure.load.report import describe_server, merged, number
from measure.load.run import Run
from measure.load.search import Search, judge, knee, pareto_front, share_interval
from measure.load.svg import Series, lines


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements at one load."""

    load: float
    """Sessions per second, or number of users."""
    figures: Figures
    runs: tuple[Run, ...]
    is_kept: bool
    is_sure: bool
    """Whether the confidence interval for the share of good requests excludes the required share."""

    @property
    def in_flight(self) -> float:
        """Mean number of requests in progress, by Little's law."""
        return self.figures.e2e.mean * self.figures.request_rate


async def sweep(
    measure: Callable[[float, int], Awaitable[Run]],
    loads: Search | Sequence[float],
    slo: Slo,
    *,
    share: float,
    max_repeats: int,
) -> list[Point]:
    """Measure loads until the search ends.

    Args:
        measure: runs one load with a seed of this number.
        loads: the search, or the loads to measure.
        slo: limits of good requests.
        share: share of requests that must be good.
        max_repeats: how often a load is measured while its verdict is uncertain.

    Returns:
        The measured loads in increasing order.
    """
    points: list[Point] = []
    fixed = iter(() if isinstance(loads, Search) else loads)
    seed = 0
    while (load := loads.next() if isinstance(loads, Search) else next(fixed, None)) is not None:
        runs: list[Run] = []
        while True:
            # Use another seed for each run. Otherwise the prefix cache would contain the prompts.
            runs.append(await measure(load, seed))
            seed += 1
            figures = merged(runs, slo)
            verdict = judge(figures.good, figures.requests - figures.cancelled, share)
            is_saturated = any(run.saturated_at_s is not None for run in runs)
            if verdict.is_sure or is_saturated or len(runs) >= max_repeats:
                break
        is_kept = verdict.is_kept and not is_saturated
        points.append(Point(load, figures, tuple(runs), is_kept, verdict.is_sure or is_saturated))
        if isinstance(loads, Search):
            loads.note(load, is_kept=is_kept)
    return sorted(points, key=lambda point: point.load)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A finished sweep."""

    title: str
    load: str
    """Description of the workload in words."""
    unit: str
    """Unit of the load: "sessions/s" or "users"."""
    slo: Slo
    share: float
    points: tuple[Point, ...]
    has_tenants: bool = False
    has_priorities: bool = False

    @property
    def knee(self) -> Point | None:
        """The load beyond which more throughput costs disproportionate latency."""
        index = knee([(point.figures.output_rate, point.figures.e2e.p50) for point in self.points])
        return None if index is None else self.points[index]

    @property
    def best(self) -> Point | None:
        """The highest load within the limits that is below every load beyond them."""
        broken = min((point.load for point in self.points if not point.is_kept), default=float("inf"))
        return max(
            (point for point in self.points if point.is_kept and point.load < broken),
            key=lambda point: point.load,
            default=None,
        )

    def suggestions(self) -> list[Suggestion]:
        """Return suggested settings with their reasons."""
        measured = [
            Measured(point.load, point.figures, point.runs[-1].server, point.is_kept, point.in_flight)
            for point in self.points
        ]
        return suggest(measured, self.slo, has_tenants=self.has_tenants, has_priorities=self.has_priorities)

    def conclusions(self) -> list[str]:
        """Describe the results in words."""
        limits, found = self.slo.describe(), []
        if limits and self.best is not None:
            good, asked = self.best.figures.good, self.best.figures.requests - self.best.figures.cancelled
            low, high = share_interval(good, asked)
            sure = "" if self.best.is_sure else "; more requests are needed to be sure (--duration, --max-repeats)"
            found.append(
                f"up to {number(self.best.load)} {self.unit}, at least {self.share:.0%} of the requests keep {limits}:"
                f" {good} of {asked} did (95 % interval {low:.1%} to {high:.1%}){sure}"
            )
        elif limits:
            found.append(f"no measured load keeps {limits} for {self.share:.0%} of the requests")
        if self.knee is not None:
            figures = self.knee.figures
            found.append(
                f"the knee is at {number(self.knee.load)} {self.unit}: {number(figures.output_rate)} output tokens/s,"
                f" e2e p50 {number(1000 * figures.e2e.p50)} ms; beyond it, latency grows faster than throughput"
            )
        slow = [number(point.load) for point in self.points if any(run.bottleneck for run in point.runs)]
        if slow:
            found.append(f"warning: at {', '.join(slow)} {self.unit} the generator was the bottleneck")
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "unit": self.unit,
            "slo": self.slo.describe(),
            "share": self.share,
            "highest_kept": self.best.load if self.best is not None else None,
            "knee": self.knee.load if self.knee is not None else None,
            "conclusions": self.conclusions(),
            "suggestions": [
                {"setting": each.setting, "value": each.value, "reason": each.reason} for each in self.suggestions()
            ],
            "results": [
                {
                    "load": point.load,
                    "kept": point.is_kept,
                    "sure": point.is_sure,
                    "repeats": len(point.runs),
                    "saturated": any(run.saturated_at_s is not None for run in point.runs),
                    "requests": point.figures.requests,
                    "failed": point.figures.failed,
                    "requests_per_s": point.figures.request_rate,
                    "out_tok_per_s": point.figures.output_rate,
                    "goodput": point.figures.goodput,
                    "goodput_share": point.figures.good_share,
                    "in_flight": point.in_flight,
                    "ttft_s": point.figures.ttft.to_json(),
                    "itl_s": point.figures.itl.to_json(),
                    "e2e_s": point.figures.e2e.to_json(),
                    "generator_late_s": point.figures.late.to_json(),
                }
                for point in self.points
            ],
        }

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of the table."""
        head = [
            self.unit,
            "req/s",
            "tokens/s",
            "in flight",
            "TTFT p50, ms",
            "TTFT p99",
            "ITL p99",
            "e2e p99",
            "good",
            "",
        ]
        rows = []
        for point in self.points:
            figures = point.figures
            state = "kept" if point.is_kept else "broken"
            if any(run.saturated_at_s is not None for run in point.runs):
                state = "saturated"
            values = (figures.request_rate, figures.output_rate, point.in_flight)
            latencies = (figures.ttft.p50, figures.ttft.p99, figures.itl.p99, figures.e2e.p99)
            rows.append(
                [
                    number(point.load),
                    *(number(value) for value in values),
                    *(number(1000 * value) for value in latencies),
                    f"{figures.good_share:.1%}",
                    state + ("" if point.is_sure else " (not sure)"),
                ]
            )
        return head, rows

    def table(self) -> list[str]:
        """Return the lines for a terminal."""
        head, rows = self.rows()
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        advice = [f"  {each.setting} {each.value}: {each.reason}" for each in self.suggestions()]
        return [
            self.load,
            "",
            *text,
            "",
            *self.conclusions(),
            *(["", "suggested settings:", *advice] if advice else []),
        ]

    def _pareto(self) -> str:
        """Return the chart of tokens per second per user against tokens per second for all users."""
        shown = [point for point in self.points if point.figures.tpot.mean > 0]
        places = [(1 / point.figures.tpot.mean, point.figures.output_rate) for point in shown]
        loads = [number(point.load) for point in shown]
        front = [places[index] for index in pareto_front(places)]
        return lines(
            "Pareto front: no other load is better in both",
            "output tokens/s of one request (1 / mean TPOT)",
            "output tokens/s",
            [Series("loads", places, labels=loads, is_line=False), Series("front", front, labels=[""] * len(front))],
        )

    def page(self) -> str:
        """Return the page with plots."""
        head, rows = self.rows()

        def curve(title: str, y: str, value: Callable[[Figures], float]) -> str:
            points = [(point.figures.output_rate, 1000 * value(point.figures)) for point in self.points]
            return lines(title, "output tokens/s", y, [Series("", points, labels=loads)])

        loads = [number(point.load) for point in self.points]

        by_load = [Series("all", [(point.load, point.figures.request_rate) for point in self.points])]
        by_load.append(Series("good", [(point.load, point.figures.goodput) for point in self.points]))
        body = [
            f"<h1>{escape(self.title)}</h1>",
            f"<p>{escape(self.load)}</p>",
            *(f"<p>{escape(text)}</p>" for text in self.conclusions()),
            "<h2>Measured</h2>",
            table(head, rows),
            "<h2>Throughput against latency</h2>",
            '<div class="charts">',
            curve("End to end, p99", "ms", lambda figures: figures.e2e.p99),
            curve("Time to first token, p99", "ms", lambda figures: figures.ttft.p99),
            curve("Time between tokens, p99", "ms", lambda figures: figures.itl.p99),
            "</div>",
            f"<p>Numbers at the points: {escape(self.unit)}.</p>",
            "<h2>Choice between speed and throughput</h2>",
            '<div class="charts">',
            self._pareto(),
            lines("Answered requests", self.unit, "requests/s", by_load),
            "</div>",
        ]
        if self.suggestions():
            rows = [[each.setting, each.value, each.reason] for each in self.suggestions()]
            body += ["<h2>Suggested settings</h2>", table(["setting", "value", "reason"], rows, of_words=True)]
        shown = self.best or self.knee
        if shown is not None:
            run = shown.runs[-1]
            body.append(f"<h2>Requests at {number(shown.load)} {escape(self.unit)}</h2>")
            body += [f"<p>{escape(describe_server(run))}</p>"] if run.server is not None else []
            body.append(gantt([each for each in run.outcomes if each.counted]))
        return document(self.title, body)
