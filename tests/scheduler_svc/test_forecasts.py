"""Forecasts: output lengths from requests alike, waits that count only competing requests, and quantiles that hold."""

import random

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.interface.records import EndReason, NoteKind
from scheduler_svc.core.queueing.calibration import Calibration
from scheduler_svc.core.queueing.output_lengths import OutputLengths, quantile
from scheduler_svc.core.requests.prediction import read_text
from shared.prefix_keys import KEY_BYTES
from tests.scheduler_svc.cluster import Cluster
from tests.scheduler_svc.requests import make_request

APP, OTHER_APP = b"a" * KEY_BYTES, b"b" * KEY_BYTES


def test_lengths_are_those_of_the_application_then_of_like_requests_then_of_all() -> None:
    """An application is identified by its system prompt.

    A combination counts once eight of its requests have finished.
    """
    lengths = OutputLengths()
    assert lengths.like(make_request()) == []
    for generated in range(10, 20):
        lengths.finished(make_request(generated=generated, tenant="t", keys={16: APP}))
    for generated in range(30, 40):
        lengths.finished(make_request(generated=generated, tenant="t", keys={16: OTHER_APP}))
    assert lengths.like(make_request(tenant="t", keys={16: APP + OTHER_APP})) == list(range(10, 20))
    both = [*range(10, 20), *range(30, 40)]
    assert lengths.like(make_request(tenant="t", keys={16: b"c" * KEY_BYTES})) == both
    assert lengths.like(make_request(tenant="t", prompt=5000)) == both
    assert lengths.like(make_request(tenant="u", grammar=b"g")) == both


def test_the_rest_of_an_output_is_that_of_outputs_which_got_as_far() -> None:
    """A request that has survived the usual length is compared with the long ones."""
    lengths = OutputLengths()
    for generated in [10] * 20 + [100, 110, 120, 130]:
        lengths.finished(make_request(generated=generated))
    assert quantile(lengths.like(make_request()), 0.5) == 10
    assert lengths.like(make_request(), 20) == [100, 110, 120, 130]


def test_applications_without_number_take_bounded_memory() -> None:
    """An application that recurs is not dropped in favour of those seen once."""
    lengths = OutputLengths()
    for number in range(20_000):
        lengths.finished(make_request(generated=5, keys={16: number.to_bytes(KEY_BYTES, "big")}))
        if not number % 100:
            lengths.finished(make_request(generated=40, keys={16: APP}))
    assert len(lengths._samples) <= 4096
    assert lengths.like(make_request(keys={16: APP})) == [40] * 64


def test_quantiles_hold_as_often_as_they_say_in_bursts() -> None:
    """All requests in a burst are forecast before the first has a result, and every burst has another speed."""
    rng, calibration = random.Random(1), Calibration()
    for _ in range(400):
        factor = rng.lognormvariate(0, 1.0)
        burst = [calibration.estimate((0.5, 0.5, 0.5), is_blocked=False) for _ in range(rng.randint(1, 20))]
        for estimate in burst:
            calibration.happened(estimate, 0.5 * factor * rng.lognormvariate(0, 0.2))
    assert calibration.within_median / calibration.count == pytest.approx(0.5, abs=0.05)
    assert calibration.within_p90 / calibration.count == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("factor", [0.2, 1.0, 7.0])
@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_quantiles_hold_as_often_as_they_say(factor: float, sigma: float) -> None:
    """However wrong the estimates are, half of the times are within the median and 90 percent within the p90."""
    rng, calibration = random.Random(1), Calibration()
    surely = 0
    for _ in range(10_000):
        base = rng.choice([0.005, 0.05, 0.5, 5.0])
        estimate = calibration.estimate((base, base, base), is_blocked=rng.random() < 0.3)
        seconds = base * factor * rng.lognormvariate(0, sigma)
        surely += seconds < estimate.surely
        calibration.happened(estimate, seconds)
    assert calibration.within_median / calibration.count == pytest.approx(0.5, abs=0.02)
    assert calibration.within_p90 / calibration.count == pytest.approx(0.9, abs=0.02)
    assert surely / calibration.count == pytest.approx(0.05, abs=0.02)


def _run(cluster: Cluster, seconds: float) -> None:
    """Run steps of 8 ms and 40 us per token for a time."""
    until = cluster.now + seconds
    while cluster.now < until:
        before = len(cluster.plans)
        cluster.plan()
        cluster.now += 0.008 + 4e-5 * sum(plan.num_tokens for plan in cluster.plans[before:])
        cluster.answer()


def _cluster(**limits: object) -> Cluster:
    cluster = Cluster(**({"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_plans_in_flight": 1} | limits))
    cluster.join(ModelWorker(b"w", num_blocks=1200, block_size=16, max_rows=8, max_model_len=1 << 15))
    return cluster


def test_a_cached_prefix_needs_no_time() -> None:
    """The next turn of a long conversation is in time within a second, and is not refused."""
    cluster = _cluster()
    long = [token % 900 for token in range(8_000)]
    cluster.submit(1, long, 5)
    _run(cluster, 5.0)
    cluster.submit(2, [3] * 4, 4000)
    _run(cluster, 0.1)
    cluster.submit(3, [4] * 4, 4000)
    turn = cluster.submit(4, [*long, 1, 2, 3], 5, deadline=cluster.now + 1.0)
    _run(cluster, 1.0)
    assert turn.end is not None
    assert turn.end.reason is EndReason.LENGTH


def test_a_blocked_request_learns_its_wait_before_the_first_has_ended() -> None:
    """The pushback is right within a factor of two from the first seconds of an overload on."""
    cluster = _cluster(max_num_seqs=8, max_queued_requests=20)
    for stream in range(1, 9):
        cluster.submit(stream, [stream] * 8, 90)
    _run(cluster, 1.5)
    for stream in range(10, 30):
        cluster.submit(stream, [stream] * 8, 100)
        _run(cluster, 0.005)
    retries, last = [], 0
    for stream in range(30, 60):
        reader = cluster.submit(stream, [stream] * 8, 100)
        if reader.end is None:
            last = stream
        else:
            retries.append(reader.end.retry_ms)
    begin = cluster.now
    while not cluster.readers[last].tokens:
        _run(cluster, 0.1)
    real_s = cluster.now - begin
    assert 0.5 < retries[-1] / 1000 / real_s < 2.0


def test_requests_held_for_a_quota_do_not_count() -> None:
    """The first token of another tenant's request is forecast as if the held ones were not there."""
    cluster = _cluster(max_num_seqs=8, tenant_limits={"bulk": TenantLimits(max_running=1)})
    for stream in range(100, 110):
        cluster.submit(stream, [stream] * 8, 10, tenant="bulk")
    _run(cluster, 1.5)
    for stream in range(200, 500):
        cluster.submit(stream, [stream] * 8, 20, tenant="bulk")
    _run(cluster, 0.2)
    cluster.submit(1, [7] * 8, 20, tenant="chat")
    (note,) = [note for note in cluster.notes if note.kind is NoteKind.FORECAST and note.stream == 1]
    of_first = next(each for each in read_text(note.text) if each.of == "first token")
    assert of_first.p90 < 0.2


def test_forecasts_are_counted_once_they_have_come_true() -> None:
    """Each forecast request counts once for its wait, its first token and its end."""
    cluster = _cluster()
    for stream in range(1, 40):
        cluster.submit(stream, [stream] * 8, 10)
        _run(cluster, 0.05)
    _run(cluster, 1.0)
    found = {each.of: each for each in cluster.core.stats().forecasts}
    assert found["wait"].count == found["first_token"].count == 38, "before the first step nothing was measured"
    assert 0 < found["end"].count <= 38
    for each in found.values():
        assert 0 <= each.within_median <= each.within_p90 <= each.count
