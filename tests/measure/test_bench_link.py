"""`quire bench link` finishes, and its simulated device keeps time; its results are not tested."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from measure.scheduler.echo_worker import EchoRows, Timeline
from measure.scheduler.link import DEFAULT_CASES, Case, LinkBenchError, cases_for, longest_turn, measure
from measure.testbed.service import QUIRE, ROOT
from protos.quire.plan.v1 import plan_pb2
from quire_server.serve.layout import child_environment
from shared.columns import from_column, to_column


@pytest.mark.every(3)
@pytest.mark.parametrize(("flags", "in_flight"), [((), [1, 2]), (("--workers=3",), [1, 2])])
def test_the_benchmark_measures_every_case(tmp_path: Path, flags: tuple[str, ...], in_flight: list[int]) -> None:
    """One short round through the real scheduler gives every case's figures, and leaves no process behind."""
    file = tmp_path / "link.json"

    ended = subprocess.run(
        [*QUIRE, "bench", "link", "--rounds=1", "--seconds=0.3", "--rows=8", "--step-ms=5", f"--json={file}", *flags],
        cwd=ROOT, env=dict(os.environ), capture_output=True, timeout=200, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr.decode()
    results = json.loads(file.read_text())["results"]
    assert [row["in_flight"] for row in results] == in_flight
    for row in results:
        assert (row["rows"], row["step_ms"], row["rounds"]) == (8, 5.0, 1)
        assert 0 < row["steps_per_s"] <= 1.1 * row["workers"] * 1000 / row["step_ms"]
        assert 0 <= row["worker_wait_share"] <= row["worst_worker_wait_share"] <= 1
        assert row["tokens_per_s"] > 0
    assert str(results[0]["steps_per_s"]) in ended.stdout.decode()


def test_a_scheduler_that_ends_is_named_at_once(tmp_path: Path) -> None:
    """An exited process is detected at once; the error contains its last output."""
    (tmp_path / "workers").mkdir()  # This folder blocks the path of the scheduler's socket.

    said = r"^quire_server\.cli\.main ended with status 1: quire scheduler: .*workers"
    with pytest.raises(LinkBenchError, match=said):
        measure(Case(1, 1, 5.0, 1), 0.1, tmp_path, child_environment(os.environ, os.getpid()))


def test_without_flags_the_cases_are_those_that_have_targets() -> None:
    """256 rows at 5 ms and 1 ms, one and two in flight, and 64 workers at 20 ms."""
    assert cases_for() == DEFAULT_CASES
    assert {(case.workers, case.rows, case.step_ms, case.in_flight) for case in DEFAULT_CASES} == {
        (1, 256, 5.0, 1), (1, 256, 5.0, 2), (1, 256, 1.0, 1), (1, 256, 1.0, 2), (64, 256, 20.0, 2), (64, 64, 20.0, 2),
    }  # fmt: skip
    assert [case.burst for case in DEFAULT_CASES if case.burst] == [2000]
    assert cases_for(workers=64) == (Case(64, 256, 20.0, 1), Case(64, 256, 20.0, 2))


def test_a_burst_is_taken_in_while_it_is_measured(tmp_path: Path) -> None:
    """Enough rows are free when the measurement begins, and all decode at its end; the longest turn is bounded."""
    case = Case(workers=3, rows=8, step_ms=5.0, in_flight=2, burst=16)

    run = measure(case, 0.5, tmp_path, child_environment(os.environ, os.getpid()))

    assert run.report.steps > 0
    assert run.report.num_rows == 24
    assert run.longest_turn_s > 0


def test_a_burst_needs_free_rows(tmp_path: Path) -> None:
    """A burst that leaves no row for the steady load is refused with a remedy."""
    with pytest.raises(LinkBenchError, match=r"--burst: 8 requests need more than 8 rows; raise --workers"):
        measure(Case(1, 8, 5.0, 1, burst=8), 0.1, tmp_path, {})


def test_the_longest_turn_is_that_of_the_last_bucket_that_grew() -> None:
    """Turns of before the measurement do not count, however long they took."""
    before = {0.001: 5.0, 0.01: 6.0, 1.0: 9.0, math.inf: 9.0}

    assert longest_turn(before, {0.001: 7.0, 0.01: 9.0, 1.0: 12.0, math.inf: 12.0}) == 0.01


def test_a_plan_in_hand_starts_when_its_predecessor_ends() -> None:
    """The waiting time covers only the time between a step's end and the next plan's arrival."""
    timeline = Timeline(step_s=1.0)
    timeline.measure_from(0.0)

    idle = [timeline.plan_arrived(now) for now in (10.0, 10.4, 12.5)]

    assert idle == [0.0, 0.0, 0.5]
    assert timeline.waits == [0.0, 0.0, 0.5]
    assert [timeline.answered() for _ in range(3)] == [11.0, 12.0, 13.5]


def test_a_worker_that_gets_no_plan_waits_until_the_end() -> None:
    """The share covers the time before the measurement's end, and none before its beginning."""
    timeline = Timeline(step_s=1.0)
    timeline.plan_arrived(0.0)
    timeline.answered()
    timeline.measure_from(2.0)
    timeline.plan_arrived(2.5)
    assert timeline.wait_until(3.0) == 0.5
    timeline.answered()

    assert timeline.wait_until(4.0) == 1.0


def test_rows_answer_as_a_workers_rows_do() -> None:
    """Rows sample from the step that computes the end of their prompt until they leave, unless they are held out."""
    rows = EchoRows(4, seed=0)
    admissions = [
        plan_pb2.Admission(row=1, token_ids=to_column([5] * 6)),
        plan_pb2.Admission(row=2, token_ids=to_column([5] * 6), num_computed_tokens=4),
    ]
    plans = [
        plan_pb2.Plan(step=1, admissions=admissions, chunk_rows=to_column([1, 2]), chunk_lengths=to_column([3, 2])),
        plan_pb2.Plan(step=2, chunk_rows=to_column([1]), chunk_lengths=to_column([3])),
        plan_pb2.Plan(step=3, holds=to_column([2])),
        plan_pb2.Plan(step=4, releases=to_column([2]), leaves=to_column([1])),
        plan_pb2.Plan(step=5),
    ]

    answers = [rows.apply(plan) for plan in plans]

    assert [from_column(sampled).tolist() for sampled, _ in answers] == [[2], [1, 2], [1], [2], [2]]
    assert all(len(sampled) == len(tokens) for sampled, tokens in answers)
