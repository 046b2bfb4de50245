"""What the core reports about waiting requests, and about those that leave their rows."""

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BatchingLimits, TenantLimits
from scheduler_svc.core.interface.records import Note, NoteKind, WaitReason
from tests.scheduler_svc.cluster import FRONTEND, Cluster


def _cluster(*, num_blocks: int = 64, num_host_blocks: int = 0, **limits: object) -> Cluster:
    """A cluster of one worker."""
    cluster = Cluster(**limits)
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, 16, num_host_blocks=num_host_blocks))
    return cluster


def _reasons(notes: list[Note], stream: int) -> list[str]:
    return [note.text for note in notes if note.stream == stream and note.kind is NoteKind.WAITS]


def _turn(cluster: Cluster) -> None:
    cluster.plan()
    cluster.answer()


def test_a_request_without_a_row_or_memory_or_worker_says_so() -> None:
    """The reason is the one that the plan found: rows, memory, or no worker at all."""
    cluster = _cluster(max_num_seqs=1)
    cluster.submit(1, [1, 2, 3], 20)
    _turn(cluster)
    cluster.submit(2, [1, 2, 3], 2)
    _turn(cluster)
    assert _reasons(cluster.notes, 2) == [WaitReason.ROWS.value]

    cluster = _cluster(num_blocks=8)
    cluster.submit(1, [1] * 20, 8)
    _turn(cluster)
    cluster.submit(2, [2] * 24, 2)
    _turn(cluster)
    assert _reasons(cluster.notes, 2) == [WaitReason.MEMORY.value]

    cluster = _cluster()
    cluster.lose(b"w/1")
    cluster.submit(3, [1], 2)
    assert _reasons(cluster.notes, 3) == [WaitReason.NO_WORKER.value]


def test_a_tenant_at_its_limit_and_a_batch_that_collects_are_named() -> None:
    """A held request names the tenant limit; a closed gate is the reason for the first request in the queue."""
    cluster = _cluster(tenant_limits={"a": TenantLimits(max_running=1), "b": TenantLimits(tokens_per_s=0.1)})
    for stream, tenant in enumerate("aabb"):
        cluster.submit(stream, [1, 2, 3], 20, tenant=tenant)
        _turn(cluster)
    assert _reasons(cluster.notes, 1) == [WaitReason.TENANT_LIMIT.value]
    assert _reasons(cluster.notes, 3) == [WaitReason.TENANT_RATE.value]

    cluster = _cluster(batching=BatchingLimits(mode="static", max_batch_size=2, max_wait_s=60.0))
    cluster.submit(1, [1], 2)
    _turn(cluster)
    assert _reasons(cluster.notes, 1) == [WaitReason.BATCH.value]


def test_a_request_waits_for_its_reader() -> None:
    """A request whose reader has no credit when it is queued waits for the reader, and then for its turn."""
    cluster = _cluster()
    cluster.submit(1, [1, 2, 3], 2, credit=0)
    _turn(cluster)
    assert _reasons(cluster.notes, 1) == [WaitReason.CREDIT.value]

    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=100))
    cluster.run()
    assert [note.kind for note in cluster.notes][-3:] == [NoteKind.ADMITTED, NoteKind.FIRST_TOKEN, NoteKind.ENDED]


def test_a_row_whose_reader_stops_is_held_out_with_one_note() -> None:
    """A running request without credit is noted once, however often it is left out; credit ends the hold."""
    cluster = _cluster()
    cluster.submit(1, [1, 2, 3], 30, credit=16)
    cluster.submit(2, [1, 2], 40)
    cluster.run()
    held = [(note.stream, note.text) for note in cluster.notes if note.kind is NoteKind.HELD]
    assert held == [(1, WaitReason.CREDIT.value)]

    cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=16))
    cluster.run()
    assert sum(note.kind is NoteKind.HELD for note in cluster.notes) == 2


def test_a_preemption_names_who_and_how() -> None:
    """An urgent request is named as the cause of a preemption; the kind shows whether the KV was swapped out."""
    for num_host_blocks, kind in ((0, NoteKind.PREEMPTED), (40, NoteKind.SWAPPED)):
        cluster = _cluster(num_host_blocks=num_host_blocks, max_num_seqs=1, policy="priority")
        cluster.submit(1, [1, 2, 3], 40)
        for _ in range(4):
            _turn(cluster)
        cluster.submit(2, [4, 5], 2, priority=9)
        cluster.run()
        (preempted,) = [note for note in cluster.notes if note.kind is kind]
        assert (preempted.stream, preempted.by) == (1, (FRONTEND, 2))
        assert "by r2" in preempted.text


def test_a_steady_decode_makes_no_notes() -> None:
    """Notes are changes: a long decode beside a waiting request adds none."""
    cluster = _cluster(max_num_seqs=1)
    cluster.submit(1, [1, 2, 3], 40)
    cluster.submit(2, [1, 2, 3], 40)
    for _ in range(4):
        _turn(cluster)
    before = len(cluster.all_notes)
    for _ in range(20):
        _turn(cluster)
    assert len(cluster.all_notes) == before


def test_the_queue_of_a_worker_is_noted_with_what_holds_it_back() -> None:
    """One note per change says it for all waiting requests, however many: rows, memory, other prompts, or a batch."""
    cluster = _cluster(max_num_seqs=2)
    for stream in range(2):
        cluster.submit(stream, [1, 2, 3], 40)
    for stream in range(2, 50):
        cluster.submit(stream, [1, 2, 3], 1)
    for _ in range(8):
        _turn(cluster)
    assert cluster.obstacles == [WaitReason.ROWS]
    cluster.run()
    assert cluster.obstacles[-1] is None

    cluster = _cluster(num_blocks=8)
    cluster.submit(0, [1] * 20, 8)
    for stream in range(1, 20):
        cluster.submit(stream, [stream] * 24, 2)
    _turn(cluster)
    assert cluster.obstacles == [WaitReason.MEMORY]

    cluster = _cluster(max_num_batched_tokens=8, max_num_seqs=4, policy="fcfs")
    cluster.submit(0, [1] * 60, 2)
    cluster.submit(1, [2] * 4, 2)
    _turn(cluster)
    _turn(cluster)
    assert cluster.obstacles == [WaitReason.BUDGET]

    cluster = _cluster(batching=BatchingLimits(mode="static", max_batch_size=2, max_wait_s=60.0))
    cluster.submit(1, [1], 2)
    _turn(cluster)
    assert cluster.obstacles == [WaitReason.BATCH]


def test_requests_whose_readers_take_nothing_give_their_rows_back() -> None:
    """A request that lacks only a row gets one, and the slow clients get all of their tokens later."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w1", num_blocks=64, block_size=16, max_rows=4))
    for stream in (1, 2, 3, 4):
        cluster.submit(stream, [stream] * 8, 30, credit=16)
    for _ in range(20):
        cluster.plan()
        cluster.answer()
    others = [cluster.submit(stream, [stream] * 8, 5) for stream in (8, 9)]
    cluster.run()
    assert all(reader.end is not None for reader in others)
    assert sum(note.kind is NoteKind.PREEMPTED for note in cluster.notes) == 2
    for stream in (1, 2, 3, 4):
        cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=stream, credit=1 << 10))
    cluster.run()
    assert [len(cluster.readers[stream].tokens) for stream in (1, 2, 3, 4)] == [30] * 4


def test_slow_readers_keep_their_rows_while_no_other_request_lacks_one() -> None:
    """A free row is enough."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w1", num_blocks=64, block_size=16, max_rows=4))
    for stream in (1, 2, 3):
        cluster.submit(stream, [stream] * 8, 30, credit=16)
    for stream in (7, 8, 9):
        cluster.submit(stream, [stream] * 8, 5)
        cluster.run()
    assert not any(note.kind is NoteKind.PREEMPTED for note in cluster.notes)


def _with_long_requests(*, num_rows: int = 16, **limits: object) -> Cluster:
    """A fair cluster in which one tenant has all rows with long requests, and waits for more."""
    cluster = Cluster(**({"policy": "fair", "max_num_seqs": num_rows, "max_num_batched_tokens": 64} | limits))
    cluster.join(ModelWorker(b"w1", num_blocks=256, block_size=16, max_rows=num_rows))
    for stream in range(num_rows + 4):
        cluster.submit(stream, [stream] * 8, 200, tenant="long")
    for _ in range(20):
        _turn(cluster)
    return cluster


def test_a_tenant_with_long_requests_gives_rows_to_one_that_lacks_them() -> None:
    """A tenant with more than eight times the rows of a waiting tenant loses a row, but no token."""
    cluster = _with_long_requests()
    others = [cluster.submit(stream, [stream] * 8, 12, tenant="other") for stream in range(100, 104)]
    for _ in range(8):
        _turn(cluster)
    assert sum(bool(other.tokens) for other in others) == 1
    assert [note.by for note in cluster.notes if note.kind is NoteKind.PREEMPTED] == [(FRONTEND, 100)]

    cluster.run()
    assert [len(other.tokens) for other in others] == [12] * 4
    assert [len(cluster.readers[stream].tokens) for stream in range(20)] == [200] * 20


def test_tenants_keep_their_rows_unless_they_have_many_more() -> None:
    """No row is taken with fewer than eight rows, without preemption, or under a policy that is not fair."""
    for limits in ({"num_rows": 7}, {"policy_preemption": "off"}, {"policy": "fcfs"}):
        cluster = _with_long_requests(**limits)
        cluster.submit(100, [100] * 8, 12, tenant="other")
        cluster.run()
        assert not any(note.kind is NoteKind.PREEMPTED for note in cluster.notes)
