"""Drained workers: what happens to the requests that they have started."""

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.effects import EndReason
from tests.scheduler_svc.cluster import Cluster

PEER = b"w1"


def _with_short_memory() -> Cluster:
    """Three requests run whose KV does not fit into their worker's memory until they are complete."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64, worker_wait_s=60.0)
    cluster.join(ModelWorker(PEER, num_blocks=12, block_size=16, max_rows=4), "w1")
    for stream in (1, 2, 3):
        cluster.submit(stream, [stream] * 20, 100)
    for _ in range(20):
        cluster.plan()
        cluster.answer()
    return cluster


@pytest.mark.parametrize("preempted_before", [False, True])
def test_a_drained_worker_completes_the_requests_that_it_preempts(preempted_before: bool) -> None:
    """It takes them back, whether they were preempted before the drain or after, and admits no other request."""
    cluster = _with_short_memory()
    while preempted_before and not any(note.kind.name == "PREEMPTED" for note in cluster.notes):
        cluster.plan()
        cluster.answer()
    cluster.handle(ev.DrainRequested(worker_id="w1", move=False))
    other = cluster.submit(9, [9] * 8, 5)
    for _ in range(400):
        cluster.plan()
        cluster.answer()
    assert any(note.kind.name == "PREEMPTED" for note in cluster.notes)
    ends = {stream: reader.end.reason for stream, reader in cluster.readers.items() if reader.end is not None}
    assert ends == dict.fromkeys((1, 2, 3), EndReason.LENGTH)
    cluster.now += 61.0
    cluster.handle(ev.TimePassed())
    assert other.end is not None
    assert other.end.reason is EndReason.NO_WORKER


def test_requests_that_a_drained_worker_preempts_move_to_another_worker() -> None:
    """With another worker, the drained one takes nothing back."""
    cluster = _with_short_memory()
    cluster.handle(ev.DrainRequested(worker_id="w1", move=False))
    while not any(note.kind.name == "PREEMPTED" for note in cluster.notes):
        cluster.plan()
        cluster.answer()
    cluster.join(ModelWorker(b"w2", num_blocks=12, block_size=16, max_rows=4), "w2")
    before = len(cluster.plans)
    cluster.run()
    assert {reader.end.reason for reader in cluster.readers.values() if reader.end} == {EndReason.LENGTH}
    assert all(plan.worker == b"w2" for plan in cluster.plans[before:] if plan.admissions)
