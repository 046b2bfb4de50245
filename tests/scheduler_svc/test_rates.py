"""Token rates of tenants: how many tokens they let through, and whom they hold."""

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.interface.effects import EndReason
from tests.scheduler_svc.cluster import FRONTEND, Cluster

RATE = 10.0
LONGEST = 300


def _cluster() -> Cluster:
    cluster = Cluster(max_num_seqs=16, max_num_batched_tokens=64, tenant_limits={"t": TenantLimits(tokens_per_s=RATE)})
    cluster.join(ModelWorker(b"w1", num_blocks=1024, block_size=16, max_rows=16), "w1")
    return cluster


def _tokens(cluster: Cluster) -> int:
    return sum(len(reader.tokens) for reader in cluster.readers.values())


def test_a_tenant_gets_its_rate_however_many_of_its_requests_arrive_at_once() -> None:
    """Beyond the burst of ten seconds and one request, only as many tokens are generated as the rate allows."""
    cluster = _cluster()
    for stream in range(1, 17):
        cluster.submit(stream, [stream], LONGEST, tenant="t")
    began = cluster.now
    for seconds in (0.0, 30.0, 30.0, 60.0):
        cluster.now += seconds
        cluster.handle(ev.TimePassed())
        cluster.run()
        assert _tokens(cluster) <= RATE * (10.0 + cluster.now - began) + LONGEST
    assert _tokens(cluster) >= RATE * 120.0


def test_other_tenants_are_not_held_for_a_tenants_rate() -> None:
    """A request of another tenant runs at once."""
    cluster = _cluster()
    for stream in range(1, 17):
        cluster.submit(stream, [stream], LONGEST, tenant="t")
    other = cluster.submit(99, [5], 5, tenant="other")
    for _ in range(10):
        cluster.plan()
        cluster.answer()
    assert other.end is not None


def test_a_request_that_has_started_is_never_held_for_the_rate() -> None:
    """After losing its worker, the request continues at once, although its tenant is in debt."""
    cluster = _cluster()
    reader = cluster.submit(1, [1], LONGEST, tenant="t")
    for _ in range(200):
        cluster.plan()
        cluster.answer()
    cluster.lose(b"w1")
    cluster.join(ModelWorker(b"w2", num_blocks=1024, block_size=16, max_rows=16), "w2")
    later = cluster.submit(2, [1], 5, tenant="t")
    cluster.run()
    assert reader.end is not None
    assert reader.end.reason is EndReason.LENGTH
    assert later.end is None


def test_an_early_end_brings_the_next_start_forward() -> None:
    """When a request ends with less output than it has reserved, the next one waits for the debt only."""
    cluster = _cluster()
    cluster.submit(1, [1] * 105, 60, tenant="t")
    cluster.plan()
    waiting = cluster.submit(2, [2], 1, tenant="t")
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    cluster.run()
    assert waiting.end is None
    cluster.now += 1.0
    cluster.handle(ev.TimePassed())
    cluster.run()
    assert waiting.end is not None
    assert waiting.end.reason is EndReason.LENGTH
