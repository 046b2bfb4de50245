"""The present limit of the service: one sentence for each planted situation, from the real planner."""

from collections import Counter

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BatchingLimits, TenantLimits
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.lifecycle.pressure import Pressure, WorkerPressure
from scheduler_svc.present_limit import Limit, LimitKind, present_limit
from tests.scheduler_svc.cluster import Cluster


def _cluster(*, num_blocks: int = 64, max_rows: int = 16, **limits: object) -> Cluster:
    """A cluster of one worker with blocks of four tokens."""
    cluster = Cluster(**limits)
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, max_rows))
    return cluster


def _turns(cluster: Cluster, count: int) -> None:
    for _ in range(count):
        cluster.plan()
        cluster.answer()


def _limit(cluster: Cluster, itl_s: float = 0.0) -> Limit:
    return present_limit(cluster.core.pressure(cluster.now), itl_s)


def test_rows_are_the_limit_and_the_sentence_says_how_many_would_fit() -> None:
    """A deep queue behind full rows: rows, memory, the remedy with an estimate, and the oldest request."""
    cluster = _cluster(max_rows=2)
    for stream in range(12):
        cluster.submit(stream, [stream, 1, 2], 40)
    _turns(cluster, 4)
    cluster.now += 30

    found = _limit(cluster)

    assert found.kind is LimitKind.ROWS
    assert found.state == "2 of 2 rows busy, memory 6% used"
    assert found.remedy.startswith("raise --max-num-seqs or add a worker (at the present lengths, memory has room for")
    assert found.waits == "10 requests wait, the oldest 30 s"
    assert found.sentence == f"{found.state}: {found.remedy}; {found.waits}"


def test_more_rows_are_not_advised_when_memory_is_nearly_full() -> None:
    """Full rows and full memory: only a worker more would help."""
    cluster = _cluster(max_rows=2, num_blocks=16)
    for stream in range(6):
        cluster.submit(stream, [stream] * 24, 4)
    _turns(cluster, 2)

    found = _limit(cluster)

    assert found.kind is LimitKind.ROWS
    assert found.remedy == "add a worker; more rows would soon lack memory"


def test_memory_is_the_limit() -> None:
    """Rows are free, but the blocks are held."""
    cluster = _cluster(num_blocks=8)
    cluster.submit(0, [1] * 24, 8)
    for stream in range(1, 20):
        cluster.submit(stream, [stream] * 24, 2)
    _turns(cluster, 1)

    found = _limit(cluster)

    assert found.kind is LimitKind.MEMORY
    assert "held by 1 request (1 of 16 rows)" in found.state
    assert "--kv-cache-memory" in found.remedy


def test_computing_prompts_is_the_limit() -> None:
    """A prompt fills the budget of each step while rows and memory are free."""
    cluster = _cluster(max_num_batched_tokens=8, max_num_seqs=8, policy="fcfs")
    cluster.submit(0, [1] * 100, 2)
    for stream in range(1, 5):
        cluster.submit(stream, [stream + 1] * 4, 2)
    _turns(cluster, 2)

    found = _limit(cluster)

    assert found.kind is LimitKind.PROMPTS
    assert found.state.startswith("prompts fill the steps: 1 prompt being computed")
    assert "--long-prefill-token-threshold" in found.remedy


def test_decoding_is_the_limit_when_nothing_waits() -> None:
    """All requests run: the time per token is what the operator can improve."""
    cluster = _cluster()
    for stream in range(3):
        cluster.submit(stream, [stream, 1], 40)
    _turns(cluster, 4)

    found = _limit(cluster, itl_s=0.031)

    assert found.kind is LimitKind.DECODE
    assert found.state.startswith("3 of 16 rows decode, 31 ms per token")
    assert found.waits == ""


def test_readers_are_the_limit() -> None:
    """Rows are held by requests whose clients read nothing, with and without a queue."""
    for waiting in (0, 3):
        cluster = _cluster(max_rows=2, capacity="guaranteed_no_evict")
        for stream in range(2):
            cluster.submit(stream, [stream, 1], 30, credit=4)
        for stream in range(2, 2 + waiting):
            cluster.submit(stream, [stream, 1], 30)
        _turns(cluster, 8)

        found = _limit(cluster)

        assert found.kind is LimitKind.CREDIT, waiting
        assert found.state.startswith("2 of 2 busy rows are held out")


@pytest.mark.parametrize(
    ("limits", "setting"),
    [(TenantLimits(max_running=1), "max_running"), (TenantLimits(tokens_per_s=0.1), "tokens_per_s")],
)
def test_a_tenant_is_its_own_limit(limits: TenantLimits, setting: str) -> None:
    """Rows are free, and most waiting requests are of a tenant at its limit."""
    cluster = _cluster(tenant_limits={"a": limits})
    for stream in range(5):
        cluster.submit(stream, [stream, 1, 2], 20, tenant="a")
        _turns(cluster, 1)

    found = _limit(cluster)

    assert found.kind is LimitKind.TENANT
    assert found.state.startswith(f"tenant 'a' is at its own limit ({setting})")
    assert found.remedy.startswith(f"raise {setting} of tenant 'a'")


def test_no_worker_is_the_limit() -> None:
    """The only worker is lost, or none can serve the waiting requests; this is reported even without requests."""
    cluster = _cluster()
    cluster.submit(1, [1], 2)
    cluster.lose(b"w/1")
    assert _limit(cluster).kind is LimitKind.NO_WORKER
    assert _limit(cluster).waits.startswith("1 request waits")
    assert _limit(Cluster()).kind is LimitKind.NO_WORKER


def test_draining_is_the_limit() -> None:
    """All workers are drained, and requests wait."""
    cluster = _cluster()
    cluster.handle(ev.DrainRequested(worker_id="w", move=False))
    cluster.submit(1, [1], 2)
    _turns(cluster, 2)

    found = _limit(cluster)

    assert found.kind is LimitKind.DRAINING
    assert found.state == "1 worker drained, none takes new requests"
    assert "quire drain WORKER --resume" in found.remedy


def test_a_batch_that_collects_is_the_limit() -> None:
    """Static batching waits for more requests."""
    cluster = _cluster(batching=BatchingLimits(mode="static", max_batch_size=4, max_wait_s=60.0))
    cluster.submit(1, [1], 2)
    _turns(cluster, 1)

    assert _limit(cluster).kind is LimitKind.BATCH
    assert "--batching continuous" in _limit(cluster).remedy


def test_an_idle_service_says_so() -> None:
    """Nothing runs, nothing waits: no remedy."""
    cluster = _cluster()
    cluster.submit(1, [1], 2)
    cluster.run()

    assert _limit(cluster).sentence == "idle: no request runs or waits"


def test_most_waiting_requests_decide() -> None:
    """A few requests of a tenant at its limit do not hide many that wait for rows, or vice versa."""
    for of_tenant, others, kind in ((3, 12, LimitKind.ROWS), (12, 3, LimitKind.TENANT)):
        cluster = _cluster(max_rows=2, tenant_limits={"a": TenantLimits(max_running=1)})
        for stream in range(of_tenant):
            cluster.submit(stream, [stream, 1], 40, tenant="a")
        for stream in range(of_tenant, of_tenant + others):
            cluster.submit(stream, [stream, 1], 40)
        _turns(cluster, 4)

        assert _limit(cluster).kind is kind


def test_every_reason_to_wait_is_known() -> None:
    """No reason of a request or of a worker's queue is without words."""
    for reason in WaitReason:
        found = Pressure(
            waiting=1, lacking=Counter([reason]), workers=(WorkerPressure(worker_id="w", obstacle=reason),)
        )
        assert present_limit(found).waits, reason
