"""`quire bench strategies`: bounds, slots from a record, claims, and one run on the real engine."""

import asyncio
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.claims.parts import STRATEGIES as RESULTS
from measure.strategies import cases, other_work, report
from measure.strategies.bounds import (
    continuous_steps,
    fewest_steps,
    fewest_steps_in_blocks,
    slots_for,
    static_steps,
)
from measure.strategies.cases import Asked, Case, Workload, all_cases
from measure.strategies.claims import claims
from measure.strategies.measure import grouped, run_cases
from measure.strategies.occupancy import Bar, Step, bars, idle_share, kv_waste, padded, steps_of
from measure.strategies.other_work import Moment
from quire_server.cli.main import main
from tests.examples import examples


def test_the_articles_batches() -> None:
    """A batch of 50, 100, 200 and 500 tokens takes 500 steps; 100 requests of 50 tokens at 10 slots take 500 anyhow."""
    assert static_steps([50, 100, 200, 500], 4) == 500
    assert static_steps([50] * 100, 10) == continuous_steps([50] * 100, 10) == fewest_steps([50] * 100, 10) == 500
    assert slots_for([50] * 100, 120) == 42
    assert static_steps([10, 50, 500] * 4, 3) == 2000
    assert fewest_steps([10, 50, 500] * 4, 3) == 747


@settings(max_examples=examples(200))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_continuous_batching_lies_between_the_bound_and_static(lengths: list[int], slots: int) -> None:
    """No order is faster than the bound, and starting the next request at once is never slower than batches."""
    assert fewest_steps(lengths, slots) <= continuous_steps(lengths, slots) <= static_steps(lengths, slots)


def test_no_order_beats_the_bound() -> None:
    """The best order of a few requests needs at least the bound's steps."""
    lengths = [7, 3, 3, 2, 2, 1]

    best = min(continuous_steps(order, 2) for order in itertools.permutations(lengths))

    assert fewest_steps(lengths, 2) <= best == 9


def test_memory_bounds_steps_too() -> None:
    """Two requests that need all blocks for half of their steps cannot overlap there."""
    bound = fewest_steps_in_blocks([32, 32], 2, prompt_tokens=16, num_blocks=3, block_size=16)

    assert bound == -(-2 * (1 + 16 * 2 + 15 * 3) // 3) == 52
    assert fewest_steps([32, 32], 2) == 32


def _steps(*computing: Sequence[tuple[int, int]], busy_s: float = 0.01) -> list[Step]:
    return [Step(tuple(each), busy_s, num_blocks=len(each), num_tokens=12 * len(each)) for each in computing]


def test_only_the_work_of_others_counts(tmp_path: Path) -> None:
    """Of 12 busy seconds on two processors in ten seconds, eight belong to our own processes."""
    before, after = Moment(100.0, 50.0, 1.0), Moment(110.0, 62.0, 9.0)
    (stat := tmp_path / "stat").write_text("cpu 100 20 30 4000 5000 6 7 8 90 91\ncpu0 1 1\n")

    assert other_work.share_of_others(before, after, processors=2) == pytest.approx(0.2)
    assert other_work.share_of_others(before, None, processors=2) is None
    assert (found := other_work.now(stat)) is not None
    assert found.busy_s * os.sysconf("SC_CLK_TCK") == pytest.approx(100 + 20 + 30 + 6 + 7 + 8)
    assert other_work.now(tmp_path / "none") is None


@pytest.mark.parametrize(("share", "said"), [(None, "not known"), (0.01, "used 1.0%"), (0.4, "no times")])
def test_the_origin_says_what_others_used(share: float | None, said: str) -> None:
    """The page states whether times may be compared."""
    assert said in report.origin(report.document([], share))


def test_slots_are_counted_and_drawn() -> None:
    """Slot 0 runs request 0, then 2; slot 1 runs request 1 and is then idle for a step."""
    steps = _steps([(0, 5), (1, 6)], [(0, 5), (1, 6)], [(0, 7)])

    own = steps_of([*_steps([(0, 4)]), *steps, *_steps([(1, 8)])], first=5, count=3)

    assert bars(own) == [Bar(0, 0, 0, 2), Bar(0, 2, 2, 3), Bar(1, 1, 0, 2)]
    assert idle_share(own, slots=2) == pytest.approx(1 / 6)
    assert kv_waste(own, block_size=16) == pytest.approx(4 / 16)


def test_padding_costs_the_time_of_full_steps() -> None:
    """A step with one of two rows is charged like a step with both, and a batch's responses come at its end."""
    first = [*_steps([(0, 0), (1, 1)], busy_s=0.02), *_steps([(0, 0)], busy_s=0.005)]
    second = _steps([(0, 2), (1, 3)], busy_s=0.03)

    form = padded([*first, *second])

    assert form.extra_s == pytest.approx(0.015)
    assert form.ends_s == pytest.approx((0.04, 0.07))
    assert form.batch_of == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.release
def test_the_engine_takes_the_steps_that_the_lengths_imply() -> None:
    """Static batches take the sum of their longest outputs; continuous batching takes as long as immediate starts."""
    workload = Workload("small", "small", tuple(Asked(length) for length in (4, 30, 8, 30, 2, 30)), 2)
    runs = [Case(workload=workload, strategy=name, slots=2) for name in ("static", "continuous")]

    async def run() -> list[dict[str, Any]]:
        done: list[Case] = []
        found = [await run_cases(group, done.append, repeats=2) for group in grouped(runs)]
        assert done == runs
        return [row for group in found for rows in group for row in rows]

    padded_run, held, continuous = asyncio.run(run())

    assert [row["strategy"] for row in (padded_run, held, continuous)] == ["static-padded", "static-held", "continuous"]
    assert held["steps"] == static_steps(workload.lengths, 2) == 90
    assert held["idle_slot_share"] == pytest.approx(1 - 104 / 180)
    assert held["out_tokens"] == continuous["out_tokens"] == 104
    assert continuous["steps"] == continuous_steps(workload.lengths, 2)
    assert padded_run["wall_s"] >= held["wall_s"]
    assert "static-held" in report.table([padded_run, held, continuous])


def _results() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text("utf-8")))


def test_the_published_results_hold_every_case() -> None:
    """measure/results/strategies.json is of the present cases."""
    found = [(row["workload"], row["slots"], row["memory"], row["policy"]) for row in _results()["results"]]

    wanted = [
        (case.workload.name, case.slots, case.memory, case.settings.get("policy", "fcfs"))
        for case in all_cases()
        for _ in range(2 if case.strategy == "static" else 1)
    ]
    assert found == wanted


def test_the_report_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The HTML report refers to no other file, and shows every claim and every run."""
    page = tmp_path / "report.html"

    assert main(["bench", "strategies", "--from", str(RESULTS), "--html", str(page)]) == 0

    text = page.read_text("utf-8")
    assert not re.search(r"(?:src|href)=|url\(|@import", text)
    assert text.count("<tr>") == 2 + len(claims(_results()["results"])) + len(_results()["results"])
    assert text.count("<svg") == len(report.PLOTTED) + 1 + 7  # plots for slots, gains, and throughput against latency
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(_results()["results"])


def test_an_unknown_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists the valid workloads."""
    assert main(["bench", "strategies", "--workload", "x"]) == 1

    assert f"unknown workload 'x'; use {cases.FOUR.name}" in capsys.readouterr().err
