"""What several workers promise: placement, draining, joining and leaving at any time."""

import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import EndReason, ServiceChanged, WorkerEmptied, WorkerWelcomed
from scheduler_svc.core.queueing.backlog import MAX_ASSIGNED_S
from scheduler_svc.core.queueing.placement import DECODE_COST
from scheduler_svc.core.scheduler import Scheduler
from tests.scheduler_svc.cluster import Cluster

PREFIX = list(range(200, 240))


def _cluster(workers: int = 2, **limits: object) -> Cluster:
    cluster = Cluster(**({"max_num_seqs": 8, "max_num_batched_tokens": 64} | limits))
    for index in range(workers):
        cluster.join(ModelWorker(b"w/%d" % index, 100, 4, 8), f"w{index}")
    return cluster


def _running(cluster: Cluster) -> dict[str, int]:
    return {worker.worker_id: worker.rows_running for worker in cluster.core.stats().workers}


def _serve_at(cluster: Cluster, home: str, other: str, prefix: list[int] = PREFIX) -> None:
    """Has one of two workers serve a prompt with this prefix."""
    cluster.handle(ev.DrainRequested(worker_id=other, move=False))
    cluster.submit(0, [*prefix, 1], 2)
    cluster.run()
    cluster.handle(ev.ResumeRequested(worker_id=other))
    (found,) = (worker.worker_id for worker in cluster.core.stats().workers if worker.blocks_cached)
    assert found == home


def _check_all(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


def test_load_is_spread() -> None:
    """Equal requests spread evenly, although every worker could take them all."""
    cluster = _cluster()
    for stream in range(8):
        cluster.submit(stream, [stream, 1, 2], 30)
    for _ in range(3):
        cluster.plan()
        cluster.answer()
    assert _running(cluster) == {"w0": 4, "w1": 4}
    cluster.run()
    _check_all(cluster)


def test_a_burst_is_spread_over_many_workers_by_rows_left_and_memory() -> None:
    """A burst that exceeds some workers' rows and others' memory fills each worker as far as possible, evenly."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    for index in range(6):
        cluster.join(ModelWorker(b"w/%d" % index, 10 if index == 0 else 100, 4, 2 if index == 1 else 8), f"w{index}")
    for stream in range(22):
        cluster.submit(stream, [stream, *range(10)], 12)
    for _ in range(3):
        cluster.plan()
        cluster.answer()
    assert sorted(_running(cluster).values()) == [2, 2, 4, 4, 5, 5]
    cluster.run()
    _check_all(cluster)


@pytest.mark.parametrize(("home", "other"), [("w0", "w1"), ("w1", "w0")])
def test_a_cached_prefix_draws_requests_until_its_worker_is_busy(home: str, other: str) -> None:
    """One request goes to the worker with its cached prefix, whichever is planned first; many requests are spread."""
    cluster = _cluster()
    _serve_at(cluster, home, other)
    cluster.submit(1, [*PREFIX, 2], 20)
    cluster.plan()
    assert _running(cluster)[home] == 1
    for stream in range(2, 10):
        cluster.submit(stream, [*PREFIX, stream + 10], 20)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    assert min(_running(cluster).values()) >= 3
    cluster.run()
    _check_all(cluster)


def _assigned_to_busy_w1() -> Cluster:
    """Return a cluster in which a request waits for w1, whose plans are all in flight."""
    prefix = list(range(200, 200 + DECODE_COST + 100))  # The cached prefix outweighs one running request.
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=1024)
    for index in range(2):
        cluster.join(ModelWorker(b"w/%d" % index, 100, 16, 8), f"w{index}")
    _serve_at(cluster, "w1", "w0", prefix)
    cluster.submit(1, [*prefix, 2], 20)
    cluster.plan()
    cluster.submit(2, [*prefix, 3], 20)
    assert b"w/0" in cluster.core.due_workers(cluster.now)
    cluster.plan_for(b"w/0")
    assert _running(cluster) == {"w0": 0, "w1": 1}
    return cluster


def test_idle_workers_are_not_asked_for_a_request_that_waits_for_a_busy_one() -> None:
    """A turn costs nothing for idle workers while the only waiting request is assigned to another worker."""
    cluster = _assigned_to_busy_w1()

    assert b"w/0" not in cluster.core.due_workers(cluster.now)

    cluster.answer()
    assert cluster.core.due_workers(cluster.now) == [b"w/1"]
    cluster.plan()
    assert _running(cluster) == {"w0": 0, "w1": 2}
    cluster.run()
    _check_all(cluster)


def test_a_request_is_not_left_to_a_worker_that_can_take_no_plan() -> None:
    """A worker that would do less work for a request, and sends no result, is waited for within a bound."""
    cluster = _assigned_to_busy_w1()

    cluster.now += MAX_ASSIGNED_S + 0.01
    cluster.handle(ev.TimePassed())
    cluster.plan_for(b"w/0")

    assert _running(cluster) == {"w0": 1, "w1": 1}
    cluster.run()
    _check_all(cluster)


def test_an_assigned_request_does_not_wait_until_busy_workers_need_no_plans() -> None:
    """A scheduler that has time for one plan per turn still plans an idle worker for which a request waits."""
    prefix = list(range(200, 200 + DECODE_COST + 100))  # The cached prefix outweighs everything else.
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=1024)
    for index in range(3):
        cluster.join(ModelWorker(b"w/%d" % index, 400, 16, 8), f"w{index}")
    cluster.handle(ev.DrainRequested(worker_id="w2", move=False))
    _serve_at(cluster, "w1", "w0", prefix)
    cluster.handle(ev.DrainRequested(worker_id="w1", move=False))
    cluster.handle(ev.ResumeRequested(worker_id="w2"))
    for stream in (1, 2):
        cluster.submit(stream, [stream] * 20, 100)
    cluster.plan()
    cluster.handle(ev.ResumeRequested(worker_id="w1"))
    cluster.submit(3, [*prefix, 3], 20)
    while any(cluster.answers.values()):
        cluster.answer()
    cluster.plan_for(b"w/0")
    assert _running(cluster) == {"w0": 1, "w1": 0, "w2": 1}

    for _ in range(3):
        while any(cluster.answers.values()):
            cluster.answer()
        cluster.plan_for(cluster.core.due_workers(cluster.now)[0])

    assert _running(cluster) == {"w0": 1, "w1": 1, "w2": 1}
    cluster.run()
    _check_all(cluster)


def test_a_request_stays_assigned_to_a_worker_that_only_waits_for_the_scheduler() -> None:
    """A scheduler with many workers plans some of them late; their assigned requests are not computed elsewhere."""
    cluster = _assigned_to_busy_w1()
    while cluster.answers[b"w/1"]:
        cluster.answer()

    cluster.now += MAX_ASSIGNED_S + 0.01
    cluster.handle(ev.TimePassed())
    cluster.plan_for(b"w/0")
    assert _running(cluster) == {"w0": 0, "w1": 1}
    cluster.plan_for(b"w/1")

    assert _running(cluster) == {"w0": 0, "w1": 2}
    cluster.run()
    _check_all(cluster)


def test_a_drained_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    """Draining without moving: running requests finish there, new ones go elsewhere, and resuming reverts this."""
    cluster = _cluster()
    for stream in range(4):
        cluster.submit(stream, [stream, 1], 20)
    cluster.plan()
    cluster.answer()
    cluster.handle(ev.DrainRequested(worker_id="w0", move=False))
    before = _running(cluster)["w0"]
    for stream in range(4, 8):
        cluster.submit(stream, [stream, 1], 20)
    cluster.plan()
    assert before == _running(cluster)["w0"] == 2
    cluster.run()
    _check_all(cluster)
    cluster.handle(ev.ResumeRequested(worker_id="w0"))
    for stream in range(8, 12):
        cluster.submit(stream, [stream, 1], 20)
    cluster.plan()
    assert _running(cluster)["w0"] == 2


def test_moving_away_loses_nothing() -> None:
    """Draining with moving: running requests go on elsewhere without gap or repeat, and the worker is empty at once."""
    cluster = _cluster()
    for stream in range(6):
        cluster.submit(stream, [stream, 1], 25)
    for _ in range(5):
        cluster.plan()
        cluster.answer()
    cluster.handle(ev.DrainRequested(worker_id="w0", move=True))
    assert _running(cluster)["w0"] == 0
    cluster.run()
    _check_all(cluster)


def test_the_last_worker_keeps_its_requests() -> None:
    """Moving away from the only worker would only stop its requests: they finish where they are."""
    cluster = _cluster(workers=1)
    cluster.submit(1, [1, 2], 20)
    cluster.plan()
    cluster.handle(ev.DrainRequested(worker_id="w0", move=True))
    cluster.run()
    _check_all(cluster)


def test_a_drain_leaves_requests_that_fit_on_no_other_worker() -> None:
    """A request for which only the drained worker has room finishes there, to its full length."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/0", 100, 4, 8), "w0")
    cluster.submit(1, [1, 2], 60)
    cluster.submit(2, [2, 2], 10)
    cluster.plan()
    cluster.join(ModelWorker(b"w/1", 5, 4, 8), "w1")
    cluster.handle(ev.DrainRequested(worker_id="w0", move=True))
    assert _running(cluster)["w0"] == 1
    cluster.run()
    _check_all(cluster)


def test_a_request_that_fits_only_a_drained_worker_is_refused() -> None:
    """A drained worker may never be resumed, so a prompt for which only it has room does not wait."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/0", 100, 4, 8), "w0")
    cluster.join(ModelWorker(b"w/1", 5, 4, 8), "w1")
    cluster.handle(ev.DrainRequested(worker_id="w0", move=False))
    reader = cluster.submit(1, list(range(30)), 10)
    cluster.run()
    assert reader.end is not None
    assert reader.end.reason is EndReason.INVALID


def test_workers_with_other_block_sizes_share_the_work() -> None:
    """A request moves between workers of different block sizes, cached prefixes included."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/0", 100, 4, 8), "w0")
    cluster.join(ModelWorker(b"w/1", 50, 8, 8), "w1")
    for stream in range(6):
        cluster.submit(stream, [*PREFIX, stream], 20)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    cluster.lose(b"w/0")
    cluster.run()
    _check_all(cluster)


def test_a_stall_of_the_scheduler_is_excused_for_just_as_long() -> None:
    """During a scheduler stall no worker is blamed; afterwards a step has only the rest of its time."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, step_deadline_s=2.0)
    cluster.join(ModelWorker(b"w/0", 100, 4, 8), "w0")
    cluster.submit(1, [1, 2], 20)
    cluster.plan()
    sent = cluster.now
    cluster.now += 3.0
    cluster.handle(ev.TimePassed())
    assert cluster.core.workers() == [b"w/0"]
    lost_after = 0.0
    while cluster.core.workers():
        cluster.now += 0.1
        cluster.handle(ev.TimePassed())
        lost_after = cluster.now - sent
    assert 5.0 < lost_after < 5.2


def test_a_cache_cap_below_one_block_leaves_one_block() -> None:
    """max_tokens_in_paged_kv_cache counts whole blocks, at least one."""
    for tokens, blocks in ((1, 1), (8, 1), (15, 1), (16, 2), (8000, 100)):
        cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, max_tokens_in_paged_kv_cache=tokens)
        cluster.join(ModelWorker(b"w/0", 100, 8, 8), "w0")
        assert cluster.core.stats().workers[0].blocks_total == blocks


def test_epochs_fit_into_64_bits_and_are_never_zero() -> None:
    """Zero means an absent field in the wire format; counting continues after the largest number."""
    core = Scheduler(CoreConfig(), incarnation=(1 << 64) - 2)
    epochs = []
    for index in range(3):
        effects = core.handle(ModelWorker(b"w/%d" % index, 10, 4, 8).hello(f"w{index}"), 1.0)
        epochs += [effect.epoch for effect in effects if isinstance(effect, WorkerWelcomed)]
    assert epochs == [(1 << 64) - 1, 1, 2]


def test_front_ends_hear_of_every_change_once() -> None:
    """The first and the last worker change what is served; a second worker of the same kind changes nothing."""
    cluster = _cluster(workers=2)
    cluster.handle(ev.DrainRequested(worker_id="w0", move=False))
    cluster.handle(ev.DrainRequested(worker_id="w1", move=False))
    cluster.handle(ev.ResumeRequested(worker_id="w1"))
    changes = [effect.ready for effect in cluster.effects if isinstance(effect, ServiceChanged)]
    assert changes == [True, False, True]


def test_a_lost_worker_is_reported_with_its_requests() -> None:
    """The core reports a lost worker with the reason and the requests that wait again."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    for stream in (1, 2):
        cluster.submit(stream, [stream], 9)
    cluster.plan()
    cluster.lose(b"w/1")
    emptied = [effect for effect in cluster.effects if isinstance(effect, WorkerEmptied)]
    assert emptied == [WorkerEmptied(worker_id="w", reason="killed", request_ids=("r1", "r2"))]
