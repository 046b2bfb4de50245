"""The scenarios of `quire bench scheduler` finish; their results are not tested."""

import pytest

from measure.scheduler.core import CoreResult, as_json, bench_burst, bench_churn, median_of
from measure.scheduler.recorder import measure
from shared.telemetry import Telemetry


@pytest.fixture(scope="module")
def telemetry() -> Telemetry:
    """Telemetry that exports nothing."""
    return Telemetry("quire-bench")


def test_a_burst_is_measured_per_admission(telemetry: Telemetry) -> None:
    """A burst over several workers gives the cost of an admission and the longest plan."""
    result = bench_burst(1, telemetry, workers=4, requests=40)

    assert (result.scenario, result.workers, result.queued) == ("burst", 4, 40)
    assert 0 < result.admit_us_p50 <= result.admit_us_p99 <= result.longest_plan_us


def test_many_tenants_wait_under_fair(telemetry: Telemetry) -> None:
    """The scenario `tenants` keeps one request of each tenant waiting."""
    result = bench_churn(8, 4, telemetry, policy="fair", queued=200, tenants=200)

    assert (result.scenario, result.policy, result.queued, result.tenants) == ("tenants", "fair", 200, 200)
    assert result.admission_us_p50 > 0


def test_a_worker_waits_for_a_part_of_the_step(telemetry: Telemetry) -> None:
    """What passes from an answer to the next plan holds the plan, and is not more than the whole step."""
    result = bench_churn(8, 4, telemetry)

    assert result.scenario == "churn"
    assert result.answer_to_plan_us_p50 > 0
    assert result.plan_us_p50 > 0


def test_the_json_keeps_its_fields(telemetry: Telemetry) -> None:
    """The file has the fields on which its readers rely, each the median over the rounds."""
    result = bench_churn(8, 2, telemetry)

    rows = as_json([median_of([result, result])])["results"]

    assert isinstance(result, CoreResult)
    assert rows[0].keys() >= {
        "scenario", "rows", "queued", "policy", "plan_us_p50", "commit_us_p50", "total_us_p50", "total_us_p99",
    }  # fmt: skip


@pytest.mark.parametrize("churn", [False, True])
def test_the_recorder_is_measured_beside_the_same_steps_without_it(churn: bool) -> None:
    """The recorder's benchmark gives the cost of a step on both sides, and the bytes that a step takes on disk."""
    off, on, thread, size = measure(4, 40, churn=churn)

    assert min(off, on, thread, size) > 0
