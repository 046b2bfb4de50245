"""The comparison of runs as text and as JSON."""

import dataclasses
from collections.abc import Callable, Sequence

from records.whatif.figures import Figures
from records.whatif.simulate import Simulated
from records.whatif.step_times import StepTimes

_LINES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("requests/s", "", lambda run: run.requests_per_s),
    ("output tokens/s", "", lambda run: run.output_tokens_per_s),
    ("TTFT mean", "s", lambda run: run.ttft.mean),
    ("TTFT p50", "s", lambda run: run.ttft.p50),
    ("TTFT p90", "s", lambda run: run.ttft.p90),
    ("TTFT p99", "s", lambda run: run.ttft.p99),
    ("ITL p50", "s", lambda run: run.itl.p50),
    ("ITL p90", "s", lambda run: run.itl.p90),
    ("ITL p99", "s", lambda run: run.itl.p99),
    ("end to end p50", "s", lambda run: run.e2e.p50),
    ("end to end p90", "s", lambda run: run.e2e.p90),
    ("end to end p99", "s", lambda run: run.e2e.p99),
    ("rows per step", "", lambda run: run.rows_per_step),
    ("workers busy", "%", lambda run: run.busy_share),
    ("prefix hit rate", "%", lambda run: run.prefix_hit_rate),
    ("preemptions", "", lambda run: run.preemptions),
    ("requests served", "", lambda run: run.requests),
    ("ended otherwise", "", lambda run: sum(run.others.values())),
)
_DRAFT_LINES: tuple[tuple[str, str, Callable[[Figures], float]], ...] = (
    ("drafts per step", "", lambda run: run.draft_tokens / max(1, run.steps)),
    ("drafts accepted", "%", lambda run: run.accepted_draft_tokens / max(1, run.draft_tokens)),
)
"""Additional lines if a run has drafts."""
_FEW_EXTRAPOLATED = 0.01
"""If the share of extrapolated steps is larger than this, the page shows a warning."""

_DISTURBED = 1.3
"""If steps take longer than this multiple of the usual pace, the machine counts as disturbed."""
_MUCH_DISTURBED = 0.1
"""If the machine was disturbed for a larger share of the time than this, the page shows a warning."""
_BUSY_SCHEDULER = 0.4
"""If decisions take a larger fraction of a core than this, the page warns that the scheduler may be too slow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A recorded run, its simulation, and a simulation with changed settings."""

    changes: Sequence[str]
    """Changed settings, as the user wrote them; empty if none was changed."""
    workers: tuple[int, int]
    """Number of workers in the recording, and in the changed simulation."""
    recorded: Figures | None
    """Results of the recorded run; None if the load is a trace."""
    simulated: Simulated
    changed: Simulated | None
    times: StepTimes
    notes: Sequence[str] = ()
    """Warnings about the recording."""


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the comparison as a JSON object; times in seconds."""
    recorded, changed = comparison.recorded, comparison.changed
    fit = comparison.times.fit
    return {
        "changes": list(comparison.changes),
        "workers": {"recorded": comparison.workers[0], "changed": comparison.workers[1]},
        "recorded": None if recorded is None else dataclasses.asdict(recorded),
        "simulated": _simulated(comparison.simulated),
        "changed": None if changed is None else _simulated(changed),
        "step_times": None if fit is None else dataclasses.asdict(fit),
        "notes": list(comparison.notes),
    }


def _simulated(run: Simulated) -> dict[str, object]:
    return {
        **dataclasses.asdict(run.figures),
        "extrapolated_share": run.extrapolated_share,
        "scheduler_load": run.scheduler_load,
        "simulated_steps_per_second": run.steps_per_second,
    }


def as_text(comparison: Comparison) -> str:
    """Return the comparison as a table with explanations."""
    recorded, simulated = comparison.recorded, comparison.simulated.figures
    changed = None if comparison.changed is None else comparison.changed.figures
    columns = ["recorded", "simulated", "error"] if recorded is not None else ["simulated"]
    columns += ["changed", "change"] if changed is not None else []
    lines = [_row("", columns)]
    runs = (recorded, simulated, changed)
    has_drafts = any(run is not None and run.draft_tokens for run in runs)
    for name, unit, value in (*_LINES, *(_DRAFT_LINES if has_drafts else ())):
        cells = []
        if recorded is not None:
            cells = [_cell(value(recorded), unit), _cell(value(simulated), unit)]
            cells.append(_ratio(value(recorded), value(simulated)))
        else:
            cells = [_cell(value(simulated), unit)]
        if changed is not None:
            cells += [_cell(value(changed), unit), _ratio(value(simulated), value(changed))]
        lines.append(_row(f"{name}, {unit}" if unit else name, cells))
    return "\n".join([*lines, "", *_explanations(comparison)])


def _explanations(comparison: Comparison) -> list[str]:
    before, after = comparison.workers
    lines = []
    if comparison.recorded is not None:
        lines.append("recorded: the record's own figures; simulated: the same requests and settings, simulated.")
        lines.append("error: how far the simulation is from the record. Trust no change that is smaller.")
    if comparison.changed is not None:
        what = list(comparison.changes) + ([f"{after} workers instead of {before}"] if after != before else [])
        lines.append(f"changed: simulated with {', '.join(what) or 'no change'}; change: against simulated.")
    if (fit := comparison.times.fit) is not None:
        lines.append(
            f"step times: learned from {fit.steps:,} steps; error of one step {fit.median_error:.0%} (median),"
            f" {fit.p90_error:.0%} (p90), of their sum {fit.total_error:+.1%}"
        )
    for name, run in (("simulated", comparison.simulated), ("changed", comparison.changed)):
        if run is not None and run.extrapolated_share > _FEW_EXTRAPOLATED:
            lines.append(
                f"caution, {name}: {run.extrapolated_share:.0%} of the steps are larger than any step of the record;"
                " their times are extrapolated"
            )
        if run is not None and run.scheduler_load > _BUSY_SCHEDULER:
            lines.append(
                f"caution, {name}: the decisions alone take {run.scheduler_load:.0%} of a core of this machine; a"
                " scheduler that is busy delays the workers, which is not simulated"
            )
    ends = {"recorded": comparison.recorded, "simulated": comparison.simulated.figures}
    for name, figures in (ends | {"changed": _figures(comparison.changed)}).items():
        if figures is not None and figures.others:
            reasons = ", ".join(f"{count} {reason}" for reason, count in figures.others.items())
            lines.append(f"ended otherwise, {name}: {reasons}")
    runs = [run for run in (comparison.simulated, comparison.changed) if run is not None]
    speed = sum(run.steps for run in runs) / max(1e-9, sum(run.seconds for run in runs))
    lines += disturbance(comparison.times)
    return [*lines, *comparison.notes, f"simulation: {speed:,.0f} steps per second of one core"]


def disturbance(times: StepTimes) -> list[str]:
    """Return a warning if the machine was slower than usual during part of the record; otherwise empty.

    The usual pace is the pace in the fastest tenth of the time.
    """
    pace = sorted(times.pace)
    if not pace:
        return []
    usual = pace[len(pace) // 10]
    slow = [each for each in pace if each > _DISTURBED * usual]
    if len(slow) < _MUCH_DISTURBED * len(pace):
        return []
    return [
        f"caution: for {len(slow) / len(pace):.0%} of the record's time, steps took {sum(slow) / len(slow) / usual:.1f}"
        " times as long as usual: other work kept the machine busy; an undisturbed machine is faster than simulated"
    ]


def _figures(run: Simulated | None) -> Figures | None:
    return None if run is None else run.figures


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<22}" + "".join(f"{cell:>12}" for cell in cells)


def _cell(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if value >= 10 else f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _ratio(before: float, after: float) -> str:
    if before == after:
        return "0 %"
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"
