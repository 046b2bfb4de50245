"""Console predictions: a record's newest requests with other settings, next to the measured results."""

import dataclasses
import math
import os
import time
from pathlib import Path

import pytest

from quire.admin.v1 import admin_pb2 as admin
from records.reader import read
from records.whatif.page import disturbance
from records.whatif.predict import check_prediction, predict
from records.whatif.step_times import StepTimes
from scheduler_svc.core.interface.config import CoreConfig
from shared.errors import InvalidRequestError, RequestNotFoundError
from tests.records.whatif.deterministic import record_run

CALM = StepTimes(
    constant_s=0.01, decode_s=0.0, prefill_s=0.0, context_s=0.0, prefill_context_s=0.0, block_copy_s=0.0, link_s=0.0
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of a service whose four rows are too few."""
    folder = tmp_path_factory.mktemp("record")
    record_run(folder, CoreConfig(max_num_seqs=4, max_num_batched_tokens=64), num_workers=1, num_requests=120)
    (opening,) = {(each.opening.unix_ns, each.opening.core_time) for each in read(folder)}
    for path in folder.iterdir():
        # The run took less than a minute of virtual time.
        os.utime(path, (0, opening[0] / 1e9 - opening[1] + 60))
    return folder


def _ask(place: Path, *settings: str, **values: float) -> admin.PredictResponse:
    question = admin.PredictRequest(settings=settings, **values)  # type: ignore[arg-type]
    question.since.FromSeconds(900)
    return predict(question, place, time.monotonic() + 60)


def test_more_rows_shorten_the_wait_and_the_simulation_says_how_good_it_is(place: Path) -> None:
    """The simulation with the current settings is close to the measurement; with twice the rows, TTFT falls."""
    found = _ask(place, "max_num_seqs=8")

    assert found.requests == found.asked_requests > 20
    assert found.present.completed_requests == found.measured.completed_requests
    assert found.present.ttft.p50 == pytest.approx(found.measured.ttft.p50, rel=0.15)
    assert found.predicted.ttft.p50 < 0.5 * found.present.ttft.p50
    assert found.predicted.rows_per_step > found.present.rows_per_step


def test_workers_and_memory_can_be_changed(place: Path) -> None:
    """A second worker shortens the wait; with a tenth of the memory, the wait is longer."""
    more = _ask(place, workers=2)
    less = _ask(place, kv_memory_factor=0.1)

    assert (more.present_workers, more.predicted_workers) == (1, 2)
    assert more.predicted.ttft.p50 < more.present.ttft.p50
    assert less.predicted.ttft.p99 > less.present.ttft.p99


def test_a_record_with_too_little_says_so(tmp_path: Path) -> None:
    """Without requests, the answer is that there is not enough record yet."""
    with pytest.raises(RequestNotFoundError, match="not enough record yet"):
        predict(admin.PredictRequest(), tmp_path, math.inf)


@pytest.mark.parametrize("setting", ["policy=best", "max_num_seqs=0.5", "colour=red"])
def test_a_wrong_setting_is_named(place: Path, setting: str) -> None:
    """The error names the setting, and no simulation runs."""
    with pytest.raises(InvalidRequestError, match=setting.partition("=")[0]):
        _ask(place, setting)


def test_a_question_is_bounded() -> None:
    """Workers, memory and settings beyond the limits are refused."""
    for question in (
        admin.PredictRequest(workers=65),
        admin.PredictRequest(kv_memory_factor=11),
        admin.PredictRequest(settings=["policy=fcfs"] * 33),
    ):
        with pytest.raises(InvalidRequestError):
            check_prediction(question)


def test_a_machine_that_was_slow_for_a_while_is_named() -> None:
    """A third of the time at twice the usual pace is a warning; a calm record and a short hiccup are none."""

    def with_pace(*pace: float) -> StepTimes:
        return dataclasses.replace(CALM, pace=pace)

    assert disturbance(with_pace(*[1.0] * 20)) == []
    assert disturbance(with_pace(*[1.0] * 20, 3.0)) == []
    (line,) = disturbance(with_pace(*[0.8] * 20, *[1.6] * 10))
    assert line.startswith("caution: for 33% of the record's time, steps took 2.0 times as long as usual")
