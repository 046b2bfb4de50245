"""What capacity modes, batching modes and tenant limits promise."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BatchingLimits, CoreConfig, TenantLimits
from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.core.workers.capacity import Capacity
from tests.scheduler_svc.cluster import FRONTEND, Cluster

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 32}


def _cluster(num_blocks: int = 200, **limits: object) -> Cluster:
    cluster = Cluster(**(LIMITS | limits))
    cluster.join(ModelWorker(b"w/1", num_blocks, 4, 16))
    return cluster


def _running(cluster: Cluster) -> int:
    return cluster.core.stats().running


def _check_all(cluster: Cluster) -> None:
    for reader in cluster.readers.values():
        assert reader.tokens == expected_output(reader.prompt, reader.max_tokens, set())


def test_guaranteed_no_evict_never_preempts() -> None:
    """Under memory pressure a started request is never paused: fewer run at once instead."""
    cluster = _cluster(num_blocks=20, capacity="guaranteed_no_evict")
    for stream in range(10):
        cluster.submit(stream, [stream, 1, 2], 25)
    cluster.run()
    _check_all(cluster)
    assert cluster.core.stats().workers[0].counters.preemptions == 0


@pytest.mark.every(3)
def test_max_utilization_learns_its_headroom() -> None:
    """Under memory pressure admission leaves room to grow: fewer requests are preempted, in fewer steps."""
    steps, preemptions = [0, 0], [0, 0]
    for learns in (False, True):
        for num_blocks, num_tokens in ((24, 25), (24, 40), (40, 60)):
            with pytest.MonkeyPatch.context() as patch:
                if not learns:
                    patch.setattr(Capacity, "headroom", 0)
                cluster = _cluster(num_blocks=num_blocks, policy="fcfs")
                for stream in range(60):
                    cluster.submit(stream, [stream, 1, 2], num_tokens)
                cluster.run()
                _check_all(cluster)
            counters = cluster.core.stats().workers[0].counters
            steps[learns] += counters.steps
            preemptions[learns] += counters.preemptions
    assert preemptions[1] < 0.8 * preemptions[0]
    assert steps[1] < steps[0]


def test_memory_is_used_again_soon_after_many_preemptions() -> None:
    """Some tens of steps after requests were preempted in rows, the memory is as full as before."""
    cluster = _cluster(num_blocks=100, max_num_seqs=16, max_num_batched_tokens=64)
    for stream in range(16):
        cluster.submit(stream, [stream, 1, 2], 80)
    for stream in range(16, 400):
        cluster.submit(stream, [stream % 256, stream // 256, 2], 8)
    worker = cluster.core.stats().workers[0]
    while worker.counters.preemptions < 8:
        cluster.plan()
        cluster.answer()
        worker = cluster.core.stats().workers[0]
    held = []
    for step in range(160):
        cluster.plan()
        cluster.answer()
        if step >= 60:
            held.append(cluster.core.stats().workers[0].blocks_held)
    assert cluster.core.stats().waiting
    assert sum(held) / len(held) > 75
    cluster.run()
    _check_all(cluster)


def test_headroom_keeps_no_worker_idle() -> None:
    """When no running request can continue, because its reader takes nothing, no headroom is kept."""
    cluster = _cluster(num_blocks=24)
    for stream in range(20):
        cluster.submit(stream, [stream, 1, 2], 25)
    cluster.run()
    assert cluster.core.stats().workers[0].counters.preemptions
    for stream in range(20, 23):
        cluster.submit(stream, [stream, 1, 2], 25, credit=4 * 16)
    cluster.run()
    assert cluster.core.stats().running == 3
    held = cluster.core.stats().workers[0].blocks_held
    newcomer = cluster.submit(23, list(range(100, 100 + 4 * (24 - held) - 2)), 2)
    cluster.run()
    assert newcomer.end is not None


def test_policy_preemption_contradicts_guaranteed_no_evict() -> None:
    """Requesting both is refused by name; leaving it open is not."""
    with pytest.raises(InvalidLimitsError, match="policy_preemption"):
        CoreConfig(capacity="guaranteed_no_evict", policy_preemption="on")
    CoreConfig(capacity="guaranteed_no_evict", policy="priority")


def test_a_static_batch_waits_for_its_last_request() -> None:
    """A static batch admits no request until its last one has finished."""
    cluster = _cluster(batching=BatchingLimits(mode="static", max_batch_size=4, max_wait_s=1000.0))
    for stream in range(8):
        cluster.submit(stream, [stream, 1], 3 if stream % 4 else 20)
    seen = set()
    while cluster.plan() + cluster.answer():
        seen.add(frozenset(stream for stream, reader in cluster.readers.items() if reader.tokens and not reader.end))
    _check_all(cluster)
    assert not any(group & {0, 1, 2, 3} and group & {4, 5, 6, 7} for group in seen)


def test_an_incomplete_static_batch_starts_after_its_maximum_wait() -> None:
    """Its plan is due when its first request has waited max_wait, without another event, and not before."""
    cluster = _cluster(batching=BatchingLimits(mode="static", max_batch_size=4, max_wait_s=0.7))
    cluster.submit(1, [1, 2], 3)
    assert cluster.plan() == 0
    due = cluster.core.next_plan_due(cluster.now)
    assert due == cluster.now + 0.7
    (peer,) = cluster.core.workers()
    assert cluster.core.plan(peer, due - 0.01)[0] is None
    assert cluster.plan() > 0
    assert cluster.now == due
    cluster.run()
    assert cluster.core.next_plan_due(cluster.now) is None


def test_a_batch_takes_a_request_that_waits_for_a_prefix_on_another_worker_through_its_gate() -> None:
    """A worker that takes such a request into a static batch still takes the batches after it."""
    batching = BatchingLimits(mode="static", max_batch_size=3, max_wait_s=0.0)
    cluster = Cluster(**(LIMITS | {"max_num_batched_tokens": 12, "long_prefill_token_threshold": 8}), batching=batching)
    cluster.join(ModelWorker(b"w/1", 200, 4, 16), "w/1")
    cluster.submit(0, list(range(60)), 3)
    cluster.submit(12, [7, 1, 2, 3], 3)
    cluster.plan_for(b"w/1", 1)
    cluster.submit(1, list(range(60)), 3)
    cluster.plan_for(b"w/1", 1)
    cluster.join(ModelWorker(b"w/2", 200, 4, 16, max_tokens_per_step=8), "w/2")
    cluster.answer()
    cluster.run()
    cluster.lose(b"w/1")
    cluster.submit(2, [5, 1, 2], 3)
    cluster.run()
    _check_all(cluster)


def test_dynamic_batches_end_at_their_token_limit() -> None:
    """A dynamic batch is full at max_tokens_per_batch, but always takes its first request."""
    limits = BatchingLimits(mode="dynamic", max_batch_size=8, max_wait_s=0.0, max_tokens_per_batch=20)
    cluster = _cluster(batching=limits)
    for stream in range(6):
        cluster.submit(stream, [stream] * 8, 4)
    cluster.submit(6, [6] * 100, 4)
    sizes = set()
    while cluster.plan() + cluster.answer():
        sizes.add(_running(cluster))
    _check_all(cluster)
    assert max(sizes) == 2


def test_a_full_dynamic_batch_stays_closed() -> None:
    """After a request did not fit into a batch, no other joins it, not even a smaller one."""
    limits = BatchingLimits(mode="dynamic", max_batch_size=8, max_wait_s=0.0, max_tokens_per_batch=20)
    cluster = _cluster(batching=limits)
    cluster.submit(0, [0] * 12, 10)
    cluster.submit(1, [1] * 12, 4)
    cluster.plan()
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    cluster.submit(2, [2] * 2, 4)
    while cluster.readers[0].end is None:
        assert _running(cluster) <= 1
        cluster.answer()
        cluster.plan()
    cluster.run()
    assert len(cluster.readers[2].tokens) == 4


def test_a_delay_lasts_about_as_long_as_a_prompt_takes() -> None:
    """With scheduler_delay_factor 1 admission waits, while others run, for as long as the newest prefill step took."""
    cluster = _cluster(batching=BatchingLimits(delay_factor=1.0))
    cluster.submit(0, [0] * 8, 30)
    cluster.plan()
    cluster.now += 0.5
    cluster.answer()
    cluster.submit(1, [1] * 8, 4)
    for _ in range(6):
        cluster.now += 0.1
        cluster.answer()
        cluster.plan()
    assert 1 in [admission.stream for plan in cluster.plans for admission in plan.admissions]
    cluster.run()
    _check_all(cluster)


def test_continuous_batching_fills_slots_at_once() -> None:
    """A waiting request starts in the step after a slot is known to become free."""
    cluster = _cluster(max_num_seqs=2)
    cluster.submit(0, [0, 1], 30)
    cluster.submit(1, [1, 1], 3)
    third = cluster.submit(2, [2, 1], 3)
    while cluster.readers[1].end is None:
        cluster.plan()
        cluster.answer()
    cluster.plan()
    cluster.answer()
    cluster.answer()
    assert third.tokens


def test_tenant_limits_hold() -> None:
    """A tenant has no more running and waiting requests than permitted; others are not delayed by it."""
    limits = {"busy": TenantLimits(max_running=2, max_queued=3)}
    cluster = _cluster(tenant_limits=limits)
    busy = [cluster.submit(stream, [stream, 1], 10, tenant="busy") for stream in range(3)]
    refused = cluster.submit(3, [3, 1], 10, tenant="busy")
    other = cluster.submit(4, [4, 1], 10, tenant="other")
    assert refused.end is not None
    assert refused.end.reason is ef.EndReason.TENANT_LIMIT
    cluster.plan()
    assert _running(cluster) == 3
    cluster.run()
    assert all(reader.end for reader in [*busy, other])


def test_a_tenants_rate_is_bounded() -> None:
    """Beyond its burst a tenant starts requests only as fast as its tokens come in."""
    cluster = _cluster(tenant_limits={"": TenantLimits(tokens_per_s=1.0)})
    for stream in range(3):
        cluster.submit(stream, [stream] * 10, 10, tenant="t")
        cluster.run()
    started = [bool(reader.tokens) for reader in cluster.readers.values()]
    assert started == [True, False, False]
    cluster.now += 11
    cluster.handle(ev.TimePassed())
    cluster.run()
    assert [bool(reader.tokens) for reader in cluster.readers.values()] == [True, True, False]


def test_the_queue_is_bounded_in_tokens() -> None:
    """Beyond max_queued_tokens a request is refused, however few wait; a single large one is not."""
    cluster = Cluster(max_queued_tokens=50)
    assert cluster.submit(0, [1] * 60, 2).end is None
    refused = cluster.submit(1, [1], 2)
    assert refused.end is not None
    assert refused.end.reason is ef.EndReason.QUEUE_FULL


def test_long_prefill_cap_leaves_room_for_others() -> None:
    """A long prompt takes no more than its cap per step, so a later short one starts in the same step."""
    cluster = _cluster(long_prefill_token_threshold=8)
    long = cluster.submit(0, [1] * 100, 2)
    short = cluster.submit(1, [2] * 4, 2)
    cluster.plan()
    cluster.answer()
    assert short.tokens
    assert not long.tokens


def test_kv_cache_limit_bounds_memory() -> None:
    """max_tokens_in_paged_kv_cache bounds the blocks in use whatever the worker has."""
    cluster = _cluster(max_tokens_in_paged_kv_cache=64)
    assert cluster.core.stats().workers[0].blocks_total == 16


def test_a_request_may_take_every_block() -> None:
    """An idle worker admits a request that fills the last block, with and without a cached prefix."""
    cluster = _cluster(num_blocks=4)
    for _ in range(2):
        cluster.submit(0, list(range(13)), 2)
        cluster.run()
        _check_all(cluster)


def test_a_started_request_leaves_its_tenants_queue() -> None:
    """A request that has started no longer counts as waiting."""
    limits = {"a": TenantLimits(max_running=1, max_queued=2)}
    cluster = _cluster(tenant_limits=limits)
    for stream in range(2):
        cluster.submit(stream, [stream, 1], 20, tenant="a")
    cluster.plan()
    assert _running(cluster) == 1
    cluster.submit(2, [2, 1], 20, tenant="a")
    refused = cluster.submit(3, [3, 1], 20, tenant="a")
    assert refused.end is not None
    assert refused.end.reason is ef.EndReason.TENANT_LIMIT
    cluster.run()
    assert [reader.end.reason.name for reader in cluster.readers.values() if reader.end] == [
        "LENGTH",
        "LENGTH",
        "LENGTH",
        "TENANT_LIMIT",
    ]


def test_the_queue_takes_tokens_up_to_its_bound() -> None:
    """max_queued_tokens may be reached but not exceeded; started and ended requests do not count."""
    cluster = Cluster(max_queued_tokens=50, max_num_seqs=1, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/1", 50, 4, 16))
    assert cluster.submit(0, [1] * 30, 2).end is None
    assert cluster.submit(1, [1] * 20, 2, tenant="other").end is None
    assert cluster.submit(2, [1], 2, tenant="third").end is not None
    cluster.plan()
    assert cluster.submit(3, [1] * 30, 2).end is None
    assert cluster.submit(4, [1], 2, tenant="third").end is not None
    cluster.run()
    assert cluster.submit(5, [1] * 50, 2).end is None


def test_the_queue_takes_requests_up_to_its_bound() -> None:
    """max_queued_requests may be reached, not exceeded, and requests without credit count."""
    cluster = Cluster(max_queued_requests=2)
    assert cluster.submit(0, [1], 2).end is None
    assert cluster.submit(1, [1], 2, credit=0).end is None
    assert cluster.submit(2, [1], 2).end is not None


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_queued_tokens"])
@given(size=st.integers(9, 30), leaving=st.lists(st.integers(0, 40), max_size=20))
def test_a_tenant_with_any_number_of_requests_leaves_room_in_the_queue(
    limit: str, size: int, leaving: list[int]
) -> None:
    """A greedy tenant gets at most 8/9 of the queue, whichever of its requests leave. Others are still admitted."""
    cluster = Cluster(**{limit: size if limit == "max_queued_requests" else 10 * size})
    greedy = [cluster.submit(stream, [1] * 10, 2, tenant="greedy") for stream in range(size + 5)]
    for stream in leaving:
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream))
        greedy.append(cluster.submit(len(greedy), [1] * 10, 2, tenant="greedy"))
    refused = greedy[size + 4].end
    assert refused is not None
    assert refused.reason is ef.EndReason.QUEUE_FULL
    assert refused.message.startswith("tenant 'greedy' has its share of the waiting queue: ")
    assert 8 * size // 9 <= cluster.core.stats().waiting <= 8 * (size + 1) // 9
    assert cluster.submit(1000, [1] * 10, 2, tenant="other").end is None


@pytest.mark.parametrize("size", [1, 8, 9, 30, 200])
def test_front_ends_learn_how_much_of_the_queue_one_call_can_use(size: int) -> None:
    """The limit is what one tenant can use of an empty queue, so that a larger call can be refused at once."""
    cluster = Cluster(max_queued_requests=size)

    accepted = sum(cluster.submit(stream, [1], 2, tenant="only").end is None for stream in range(size + 1))

    assert cluster.core.service_state().max_call_requests == accepted


def test_greedy_tenants_come_to_hold_equal_parts_of_the_queue() -> None:
    """Each refills what it lost, and the oldest leave. At the end the parts differ by eight requests at most."""
    size = 200
    cluster = Cluster(max_queued_requests=size)
    waiting: list[tuple[int, str]] = []

    def refill(*tenants: str) -> None:
        for tenant in tenants:
            while cluster.submit(stream := len(cluster.readers), [1], 2, tenant=tenant).end is None:
                waiting.append((stream, tenant))

    refill("first")
    for _ in range(2 * size):
        refill("second", "third", "first")
        stream, _ = waiting.pop(0)
        cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream))

    parts = Counter(tenant for _, tenant in waiting)
    assert max(parts.values()) - min(parts[tenant] for tenant in ("first", "second", "third")) <= 8
    assert sum(parts.values()) <= size


def test_the_share_of_a_tenant_does_not_count_accepted_requests_as_new() -> None:
    """A new core accepts all requests that an earlier one accepted, however many one tenant has."""
    cluster = Cluster(max_queued_requests=20)
    again = [cluster.submit(stream, [1], 2, again=True, accepted=True, tenant="t") for stream in range(30)]
    assert all(reader.end is None for reader in again)
    assert cluster.submit(30, [1], 2, tenant="t").end is not None
