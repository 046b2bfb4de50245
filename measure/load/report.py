"""Reports of finished runs: a JSON object, and a table for the terminal. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from measure.load.figures import Figures, Interval, Slo
from measure.load.outcomes import Outcome
from measure.load.run import Run
from measure.spread import Spread

RATES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("requests/s", "requests_per_s", lambda figures: figures.request_rate),
    ("goodput, requests/s", "goodput", lambda figures: figures.goodput),
    ("goodput, share", "goodput_share", lambda figures: figures.good_share),
    ("output tokens/s", "out_tok_per_s", lambda figures: figures.output_rate),
    ("prompt tokens/s", "prompt_tok_per_s", lambda figures: figures.prompt_rate),
    ("TTFT p50, ms", "ttft_p50_ms", lambda figures: 1000 * figures.ttft.p50),
    ("TTFT p99, ms", "ttft_p99_ms", lambda figures: 1000 * figures.ttft.p99),
    ("ITL p99, ms", "itl_p99_ms", lambda figures: 1000 * figures.itl.p99),
    ("e2e p99, ms", "e2e_p99_ms", lambda figures: 1000 * figures.e2e.p99),
)
"""Rates that are reported with confidence intervals over the repeats: title, name in JSON, value."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a benchmark: one run, or several repeats with different seeds."""

    title: str
    load: str
    """Description of the load in words."""
    slo: Slo
    runs: tuple[Run, ...]

    @property
    def figures(self) -> Figures:
        """Metrics over the requests of all repeats. Rates use the sum of the repeats' durations."""
        return merged(self.runs, self.slo)

    def intervals(self) -> dict[str, Interval]:
        """Return the means over the repeats with their intervals, by name."""
        return {name: Interval.of([value(run.figures) for run in self.runs]) for _, name, value in RATES}

    def warnings(self) -> list[str]:
        """Return the warnings that a reader needs before using the numbers."""
        found = []
        for number, run in enumerate(self.runs, 1):
            repeat = f"repeat {number}: " if len(self.runs) > 1 else ""
            if run.bottleneck:
                found.append(f"{repeat}the generator was the bottleneck: {run.bottleneck}; use more --processes")
            if run.held_back:
                found.append(
                    f"{repeat}{run.held_back} sessions began late, because --max-in-flight {run.plan.max_in_flight}"
                    " sessions were open; the delay counts as latency"
                )
            if run.saturated_at_s is not None:
                found.append(
                    f"{repeat}over-saturated: stopped after {run.saturated_at_s:.0f} s, because requests arrived faster"
                    " than the server began to answer them; lower the rate"
                )
            if run.shortened:
                found.append(
                    f"{repeat}{run.shortened} turns exceeded the model's context and were truncated or omitted"
                )
            if short := sum(each.is_short for each in run.outcomes if each.counted) if run.plan.ignore_eos else 0:
                found.append(
                    f"{repeat}{short} of {run.figures.done} responses have fewer tokens than requested: the server does"
                    " not heed ignore_eos, or does not say how many tokens a message has"
                )
        if self.figures.done == 0:
            found.append("no request got a response; latencies are unknown")
        elif not self.figures.prompt_tokens:
            found.append("the server does not report prompt tokens in its streams; their number is unknown")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object; `docs/benchmarking.md` describes it."""
        figures = self.figures
        return {
            "load": self.load,
            "slo": self.slo.describe(),
            "requests": figures.requests,
            "answered": figures.done,
            "cancelled": figures.cancelled,
            "failed": figures.failed,
            "failures": dict(figures.failures),
            "wall_s": figures.wall_s,
            "prompt_tokens": figures.prompt_tokens,
            "cached_prompt_tokens": figures.cached_tokens,
            "out_tokens": figures.output_tokens,
            "requests_per_s": figures.request_rate,
            "out_tok_per_s": figures.output_rate,
            "prompt_tok_per_s": figures.prompt_rate,
            "goodput": figures.goodput,
            "goodput_share": figures.good_share,
            "ttft_s": figures.ttft.to_json(),
            "itl_s": figures.itl.to_json(),
            "tpot_s": figures.tpot.to_json(),
            "e2e_s": figures.e2e.to_json(),
            "later_ttft_s": figures.later_ttft.to_json(),
            "session_s": figures.session.to_json(),
            "generator_late_s": figures.late.to_json(),
            "warnings": self.warnings(),
            "repeats": [_run_json(run) for run in self.runs],
            "intervals": {name: interval.to_json() for name, interval in self.intervals().items()},
        }

    def table(self) -> list[str]:
        """Return the lines of the table for a terminal."""
        figures = self.figures
        lines = [
            self.load,
            "",
            f"requests    {figures.requests} in {figures.wall_s:.1f} s: {figures.done} answered,"
            f" {figures.failed} failed, {figures.cancelled} cancelled",
            f"tokens      {figures.prompt_tokens} prompt ({figures.cached_tokens} cached),"
            f" {figures.output_tokens} output",
            "",
        ]
        intervals = self.intervals()
        for title, name, _ in RATES[: 5 if len(self.runs) == 1 else len(RATES)]:
            interval = intervals[name]
            spread = f" ± {number(interval.half_width)}" if len(self.runs) > 1 else ""
            lines.append(f"{title:<22}{number(interval.mean):>10}{spread}")
        if len(self.runs) > 1:
            lines.append(f"(mean of {len(self.runs)} repeats ± half of the 95 % confidence interval)")
        lines += [
            "",
            f"{'ms':<16}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")),
        ]
        lines += [
            f"{name:<16}" + "".join(f"{cell:>10}" for cell in _milliseconds(spread))
            for name, spread in spreads(figures)
        ]
        if figures.failures:
            kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(figures.failures.items()))
            lines += ["", f"failures    {kinds}"]
        for run in self.runs:
            if run.server is not None:
                lines += ["", "server      " + describe_server(run)]
        limits = self.slo.describe()
        lines += ["", f"goodput counts requests with {limits}"] if limits else []
        lines += ["", *(f"warning: {text}" for text in self.warnings())] if self.warnings() else []
        return lines


def merged(runs: Sequence[Run], slo: Slo) -> Figures:
    """Return metrics over the requests of several runs. Rates use the sum of the runs' durations."""
    if len(runs) == 1:
        return runs[0].figures
    outcomes: list[Outcome] = [each for run in runs for each in run.outcomes]
    figures = Figures.of(outcomes, slo)
    return figures.over(sum(run.figures.wall_s for run in runs))


def spreads(figures: Figures) -> list[tuple[str, Spread]]:
    """Return the distributions of a run, by title. Those about sessions appear if sessions have several turns."""
    has_turns = figures.later_ttft.count > 0
    return [
        ("TTFT", figures.ttft),
        *([("TTFT, later", figures.later_ttft)] if has_turns else []),
        ("ITL", figures.itl),
        ("TPOT", figures.tpot),
        ("e2e", figures.e2e),
        *([("session", figures.session)] if has_turns else []),
        ("generator late", figures.late),
    ]


def describe_server(run: Run) -> str:
    """Return the server's metrics in one line."""
    server = run.server
    assert server is not None
    parts = [
        (server.rows_per_step, "{:.1f} sequences per step"),
        (server.running, "{:.1f} running"),
        (server.waiting, "{:.1f} waiting on average"),
        (server.waiting_max, "{:.0f} waiting at most"),
        (server.kv_usage_max, "{:.0%} of the KV cache at most"),
        (server.prefix_hit_share, "{:.1%} prefix hits"),
        (server.preemptions, "{:.0f} preemptions"),
        (server.device_idle_share, "device idle {:.0%}"),
    ]
    return ", ".join(text.format(value) for value, text in parts if value is not None) or "no known metrics"


def number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _milliseconds(spread: Spread) -> list[str]:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.p999, spread.max)
    return [number(1000 * value) if spread.count else "-" for value in values]


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "seed": run.plan.seed,
        "requests": run.figures.requests,
        "failed": run.figures.failed,
        "out_tok_per_s": run.figures.output_rate,
        "goodput": run.figures.goodput,
        "ttft_s": run.figures.ttft.to_json(),
        "itl_s": run.figures.itl.to_json(),
        "e2e_s": run.figures.e2e.to_json(),
        "tenants": dict(Counter(each.tenant for each in run.outcomes if each.counted and each.tenant)),
        "saturated_at_s": run.saturated_at_s,
        "generator": {
            "processes": run.processes,
            "cpu_s": run.cpu_s,
            "late_s": run.figures.late.to_json(),
            "loop_late_s": run.loop_late.to_json(),
            "bottleneck": run.bottleneck,
        },
        "server": run.server.to_json() if run.server is not None else None,
    }
