"""Energy of steps: divided by the tokens of each request, and never lost while a request lives."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.plan.v1 import plan_pb2
from records.rules.model_worker import ModelWorker
from scheduler_svc.core.planning.energy import split
from scheduler_svc.metrics import SchedulerMetrics
from shared import metric_names as names
from tests.examples import examples
from tests.scheduler_svc.cluster import Cluster

STEP_J = 2.0


@settings(max_examples=examples(100))
@given(st.floats(0.0, 1e6), st.lists(st.integers(0, 8192), min_size=1, max_size=64))
def test_shares_add_up_and_are_proportional(energy_j: float, tokens: list[int]) -> None:
    """A row with twice the tokens has twice the energy, and the sum is the step's energy."""
    shares = split(energy_j, np.array(tokens, np.int32))

    assert shares.sum() == pytest.approx(energy_j if any(tokens) else 0.0)
    assert shares.tolist() == pytest.approx([energy_j * each / max(1, sum(tokens)) for each in tokens])


def _serve(cluster: Cluster, peer: bytes) -> int:
    """Serve until no request is left; each step takes `STEP_J`. Return the number of steps that compute."""
    while cluster.plan() or cluster.answers[peer]:
        cluster.handle(replace(cluster.answers[peer].popleft(), energy_j=STEP_J))
    return sum(plan.num_tokens > 0 for plan in cluster.plans)


@pytest.mark.parametrize("blocks", [64, 11])
def test_the_energy_of_all_steps_reaches_the_requests(blocks: int) -> None:
    """With chunks, several rows, and preemptions for lack of blocks, the ends have all energy together."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=8)
    cluster.join(ModelWorker(b"w/0", blocks, 4, 4))
    readers = [cluster.submit(stream, list(range(1, 14 + stream)), 9) for stream in range(3)]

    num_steps = _serve(cluster, b"w/0")

    ends = [reader.end for reader in readers if reader.end is not None]
    assert len(ends) == 3
    assert sum(end.energy_j for end in ends) == pytest.approx(STEP_J * num_steps)
    assert all(end.energy_j > 0 for end in ends)
    assert any(end.preemptions for end in ends) == (blocks == 11)


def test_a_prompt_token_counts_as_much_as_a_decode_row() -> None:
    """While one row decodes, a chunk of seven tokens has seven eighths of the step."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=8)
    cluster.join(ModelWorker(b"w/0", 64, 4, 2))
    first = cluster.submit(1, [1, 2], 40)
    cluster.plan()
    cluster.handle(cluster.answers[b"w/0"].popleft())
    second = cluster.submit(2, [3] * 7, 1)
    cluster.handle(cluster.answers[b"w/0"].popleft())  # A step that was planned before.

    cluster.plan()
    cluster.handle(replace(cluster.answers[b"w/0"].popleft(), energy_j=8.0))
    cluster.run()

    assert first.end is not None
    assert second.end is not None
    assert (first.end.energy_j, second.end.energy_j) == pytest.approx((1.0, 7.0))


def test_without_measurements_requests_have_no_energy() -> None:
    """0 means that it is not known."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/0", 64, 4, 2))
    reader = cluster.submit(1, [1, 2], 5)
    cluster.run()

    assert reader.end is not None
    assert reader.end.energy_j == 0.0


def _families(metrics: SchedulerMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    found = metrics.families(Cluster().core.stats())
    return {
        each.name: {tuple(sorted(sample.labels.values())): sample.value for sample in each.samples} for each in found
    }


def test_metrics_have_what_a_worker_can_read_and_nothing_else() -> None:
    """Energy and readings appear with the first step that has them; a field that cannot be read is absent."""
    metrics = SchedulerMetrics()
    metrics.observe_step("w0", 1, plan_pb2.StepTimings(), 0.0)
    assert not {names.WORKER_ENERGY.prometheus_name, names.DEVICE_POWER.prometheus_name} & set(_families(metrics))

    readings = plan_pb2.DeviceReadings(power=300.0, memory_used=5)
    timings = plan_pb2.StepTimings(energy_uj=1_500_000, idle_energy_uj=500_000, device=readings)
    metrics.observe_step("w0", 2, timings, float("inf"))

    found = _families(metrics)
    assert found[names.WORKER_ENERGY.prometheus_name] == {("step", "w0"): 1.5, ("idle", "w0"): 0.5}
    assert found[names.DEVICE_POWER.prometheus_name] == {("w0",): 300.0}
    assert found[names.DEVICE_MEMORY.prometheus_name] == {("used", "w0"): 5}
    assert names.DEVICE_UTILISATION.prometheus_name not in found
    metrics.observe_step("w0", 3, plan_pb2.StepTimings(device=readings), -1e9)
    assert names.DEVICE_POWER.prometheus_name not in _families(metrics), "readings of an idle worker are not reported"
