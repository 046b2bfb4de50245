"""Strategies of the console: the newest requests of a record under static, dynamic and continuous batching."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from quire.admin.v1 import admin_pb2 as admin
from records.rules.model_worker import ModelWorker
from records.whatif.load import Load, Member, traced
from records.whatif.recent import newest
from records.whatif.step_times import StepTimes
from records.whatif.strategies import check_comparison, compare_strategies, run_strategies
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from shared.errors import InvalidRequestError, RequestNotFoundError

ROWS = 4
TIMES = StepTimes(
    constant_s=0.01, decode_s=0.0, prefill_s=0.0, context_s=0.0, prefill_context_s=0.0, block_copy_s=0.0, link_s=0.0
)


def _member() -> Member:
    hello = ModelWorker(b"w/1", 4000, 16, 64).hello("w", ev.HelloReason.STARTED)
    return Member(hello=hello)


def _load(lengths: list[int], every_s: float = 0.0) -> Load:
    arrivals = [traced(every_s * at, 8, length, block_size=16) for at, length in enumerate(lengths)]
    return Load(config=CoreConfig(), arrivals=arrivals, members=[_member()], duration=1.0)


def _runs(load: Load) -> dict[str, admin.StrategyRun]:
    found = run_strategies(load, TIMES, since_s=1000.0, rows=ROWS)
    assert (found.requests, found.rows) == (len(load.arrivals), ROWS)
    return {run.name: run for run in found.runs}


def test_continuous_batching_fills_the_rows_that_static_batching_leaves_idle() -> None:
    """With one long request among short ones, a static batch ends with it, while a continuous one admits others."""
    runs = _runs(_load([100, 10, 10, 10] * 4))
    assert list(runs) == ["static", "dynamic", "continuous"]
    assert runs["continuous"].seconds < 0.6 * runs["static"].seconds
    assert runs["continuous"].row_share > 1.5 * runs["static"].row_share
    for run in runs.values():
        assert {stay.request for stay in run.stays} == set(range(16))
        assert {stay.row for stay in run.stays} == set(range(ROWS))
        for stay in run.stays:
            assert stay.begin < stay.decode <= stay.end


def test_no_request_joins_a_static_batch() -> None:
    """Under static batching the stays form batches no larger than the rows; under continuous batching they overlap."""
    runs = _runs(_load([40, 10, 20, 30] * 3, every_s=0.01))
    begins = sorted(stay.begin for stay in runs["static"].stays)
    ends = sorted(stay.end for stay in runs["static"].stays)
    for batch in range(2):
        assert ends[ROWS * (batch + 1) - 1] <= begins[ROWS * (batch + 1)]
    joined = [stay.begin for stay in runs["continuous"].stays]
    assert any(stay.begin < begin < stay.end for stay in runs["continuous"].stays for begin in joined)


def test_a_row_has_one_request_at_a_time() -> None:
    """Stays of one row do not overlap under any strategy."""
    for run in _runs(_load([30, 5, 17, 9] * 6, every_s=0.02)).values():
        for row in range(ROWS):
            stays = sorted((stay.begin, stay.end) for stay in run.stays if stay.row == row)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(stays))


def test_the_newest_requests_are_used() -> None:
    """Requests before the time are left out, and the first one that is used arrives at 0."""
    load = dataclasses.replace(_load([10] * 6, every_s=1.0), duration=5.0)
    found = run_strategies(load, TIMES, since_s=2.5, rows=ROWS)
    assert (found.requests, found.older_left_out) == (3, False)
    many = _load([25_000] * 6, every_s=1.0)
    assert [each.at for each in newest(many.arrivals)] == [0.0, 1.0]


class _Clock:
    """A clock that goes on with each look at it: by a second, or by more and more."""

    def __init__(self, power: int) -> None:
        self._power = power
        self.looks = 0

    def __call__(self) -> float:
        """Return the time, s."""
        self.looks += 1
        return float(self.looks**self._power)


@pytest.mark.parametrize(
    ("power", "budget", "expected"),
    [(1, 0.0, range(10, 11)), (1, 4.0, range(15, 30)), (1, math.inf, range(40, 41)), (4, 20.0, range(10, 11))],
    ids=["no time", "time for some", "time for all", "slower than planned"],
)
def test_what_there_is_no_time_for_is_left_out(power: int, budget: float, expected: range) -> None:
    """The newest requests are simulated as time permits, at least a few; the response shows that some were omitted."""
    load, clock = _load([400] * 40, every_s=0.01), _Clock(power)
    run_strategies(_load([400] * 10, every_s=0.01), TIMES, since_s=1000.0, rows=ROWS, clock=clock)
    first_s = clock()

    clock = _Clock(power)
    found = run_strategies(load, TIMES, since_s=1000.0, rows=ROWS, ends_at=budget * first_s, clock=clock)

    assert found.requests in expected
    assert found.older_left_out == (found.requests < 40)
    assert [(run.name, len(run.stays)) for run in found.runs] == [
        (name, found.requests) for name in ("static", "dynamic", "continuous")
    ]


def test_a_record_without_requests_is_refused(tmp_path: Path) -> None:
    """An empty record is an error that says what to do."""
    with pytest.raises(RequestNotFoundError, match="compare: record: contains no requests"):
        compare_strategies(admin.CompareStrategiesRequest(), tmp_path, math.inf)


@pytest.mark.parametrize(("rows", "since_s"), [(257, 60), (8, 901), (8, 0)])
def test_a_question_is_bounded(rows: int, since_s: int) -> None:
    """Rows and times beyond the limits are refused."""
    question = admin.CompareStrategiesRequest(rows=rows)
    question.since.FromSeconds(since_s)
    with pytest.raises(InvalidRequestError):
        check_comparison(question)
