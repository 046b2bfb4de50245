"""A sweep finds a server's known capacity, and gives its reasons in words."""

import asyncio
from array import array
from dataclasses import replace

from measure.load.arrivals import Gamma
from measure.load.figures import Figures, Slo
from measure.load.outcomes import Outcome
from measure.load.plan import Address, Plan
from measure.load.run import Run
from measure.load.search import Search
from measure.load.server import ServerFigures
from measure.load.sweep import Point, SweepReport, sweep
from measure.spread import Spread
from tests.measure.test_load import WORKLOAD

SLO = Slo.parse(["ttft_ms=500", "itl_ms=100"])
CAPACITY = 10.0
SERVER = ServerFigures(0.0, 0.0, 0.0, 0.0, 5.0, 1.0, 4.0, 0.5, 100.0, 5.0, 0.1)


def _served(load: float, seed: int, seconds: float = 60.0) -> Run:
    """Return what a server with a queue of constant service time would do at this load."""
    outcomes, free_s = [], 0.0
    for number, due_s in enumerate(Gamma(load, burstiness=50.0).times(seed)):
        if due_s > seconds:
            break
        free_s = max(free_s, due_s) + 1 / CAPACITY
        times = array("d", [free_s + 0.02 * token for token in range(8)])
        outcomes.append(Outcome(number, due_s, due_s, times[-1], message_times_s=times, output_tokens=8))
    plan = Plan(Address(), Gamma(load), WORKLOAD)
    saturated = 30.0 if load > 2 * CAPACITY else None
    return Run(plan, tuple(outcomes), Figures.of(outcomes, SLO), Spread.of([]), 0, 0.0, 1, saturated, SERVER)


def _sweep(loads: "Search | list[float]", max_repeats: int = 3) -> list[Point]:
    async def measure(load: float, seed: int) -> Run:
        return _served(load, seed)

    return asyncio.run(sweep(measure, loads, SLO, share=0.95, max_repeats=max_repeats))


def _report(points: list[Point], slo: Slo = SLO, **more: bool) -> SweepReport:
    return SweepReport("sweep", "8 tokens", "sessions/s", slo, 0.95, tuple(points), **more)


def test_the_highest_load_within_the_limits_is_found() -> None:
    """Within the tolerance below the capacity; every load above it breaks the limits."""
    report = _report(_sweep(Search(1.0, 256.0, tolerance=0.05)))

    assert report.best is not None
    assert 0.85 * CAPACITY <= report.best.load <= 1.02 * CAPACITY
    assert all(not point.is_kept for point in report.points if point.load > 1.05 * CAPACITY)
    assert [point.load for point in report.points] == sorted(point.load for point in report.points)
    assert report.to_json()["highest_kept"] == report.best.load
    assert f"up to {report.best.load:.4g} sessions/s" in report.conclusions()[0]


def test_a_load_is_measured_again_only_while_it_is_not_sure() -> None:
    """Far from the capacity one run is enough; each run has a different seed."""
    points = _sweep([2.0, 9.9, 40.0])

    assert [len(points[0].runs), len(points[2].runs)] == [1, 1]
    assert [point.is_sure for point in (points[0], points[2])] == [True, True]
    assert (points[0].is_kept, points[2].is_kept) == (True, False)
    few = _sweep([0.1], max_repeats=3)[0]
    assert (len(few.runs), few.is_sure) == (3, False)  # Each run has six requests.


def test_a_server_that_keeps_nothing_is_reported() -> None:
    """No load, no suggestion, and a sentence that says so."""
    report = _report(_sweep([30.0, 40.0]))

    assert report.best is None
    assert report.suggestions() == []
    assert "no measured load keeps TTFT ≤ 500 ms, ITL ≤ 100 ms" in report.conclusions()[0]


def test_suggestions_have_their_reasons() -> None:
    """Room for the requests in progress; a policy that fits the requests; chunks by which limit breaks."""
    points = _sweep([4.0, 8.0, 12.0, 16.0])
    suggested = {each.setting: each for each in _report(points).suggestions()}

    assert suggested["--max-num-seqs"].value == "8"
    assert suggested["--policy"].value == "edf"
    assert suggested["--max-num-batched-tokens"].value == "twice the present value"
    assert "first token is what breaks" in suggested["--max-num-batched-tokens"].reason
    fair = {each.setting: each.value for each in _report(points, has_tenants=True).suggestions()}
    assert fair["--policy"] == "fair"
    tight = {each.setting: each.value for each in _report(points, replace(SLO, itl_s=0.021)).suggestions()}
    assert tight["--max-num-batched-tokens"] == "half of the present value"


def test_the_page_and_the_table_have_every_load() -> None:
    """A row for each, and five charts besides the requests."""
    report = _report(_sweep([4.0, 8.0, 12.0]))

    assert [row[0] for row in report.rows()[1]] == ["4", "8", "12"]
    assert report.page().count("<svg") == 6
    assert "<script" not in report.page()
