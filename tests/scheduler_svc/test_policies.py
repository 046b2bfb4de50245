"""The promises of each admission order, and what keeps every request from starving."""

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig, RequestClass, TenantLimits
from scheduler_svc.core.interface.records import NoteKind
from scheduler_svc.core.planning.batch_selection import MAX_OVERTAKEN
from scheduler_svc.core.planning.victims import Candidates, choose_victims
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.policies import (
    AGEING_S,
    SJF_S_PER_TOKEN,
    FairPolicy,
    KeyedQueue,
    LongestPrefixQueue,
    WaitingQueue,
    fcfs_key,
    late_rank,
    make_policy,
)
from scheduler_svc.core.queueing.service_ledger import ServiceLedger
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.accounts import Account, AccountNumbers
from scheduler_svc.core.requests.prediction import Prediction
from scheduler_svc.core.requests.request import Request, RequestState, Wait
from shared.request_spec import RequestSpec
from tests.examples import examples
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader
from tests.scheduler_svc.operations import count_calls
from tests.scheduler_svc.requests import make_request


class Line:
    """A queue and its policy, which is notified of waiting requests, as by the backlog."""

    def __init__(
        self, name: str, weights: dict[str, float] | None = None, classes: dict[str, RequestClass] | None = None
    ) -> None:
        self.policy = make_policy(name, weights or {}, classes or {})
        self._queue = self.policy.make_queue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, request: Request) -> None:
        """Add a request to its queue."""
        self.policy.enter(request.account)
        self._queue.push(request)

    def take(self, cached: Callable[[Request], int] = lambda _: 0) -> Request | None:
        """Return the next request."""
        request = self._queue.take(cached)
        if request is not None:
            self.policy.leave(request.account)
        return request

    def discard(self, request: Request) -> None:
        """Remove a request."""
        request.state = RequestState.FINISHED
        self._queue.discard(request)
        self.policy.leave(request.account)


def _drain(queue: WaitingQueue | Line, cached: dict[int, int] | None = None) -> list[int]:
    taken = []
    while (request := queue.take(lambda each: (cached or {}).get(each.sequence, 0))) is not None:
        taken.append(request.sequence)
        if isinstance(queue, WaitingQueue):
            queue.admitted(request)
    return taken


def _filled(policy: str, *requests: Request) -> Line:
    queue = Line(policy)
    for request in requests:
        queue.push(request)
    return queue


def test_fcfs_is_the_order_of_arrival() -> None:
    """A request that returns later is still ahead of those that arrived after it."""
    assert _drain(_filled("fcfs", make_request(3), make_request(1), make_request(2))) == [1, 2, 3]


def test_priority_goes_first_until_waiting_outweighs_it() -> None:
    """One level is worth `AGEING_S` of waiting: a higher level wins within that time and loses beyond it."""
    early = make_request(1, arrival=0.0, priority=0)
    soon = make_request(2, arrival=AGEING_S - 1, priority=1)
    late = make_request(3, arrival=AGEING_S + 1, priority=1)
    assert _drain(_filled("priority", early, soon, late)) == [2, 1, 3]


def test_sjf_prefers_short_ones_until_waiting_outweighs_it() -> None:
    """A long request is overtaken only by requests that arrive within its length's worth of time."""
    long = make_request(1, arrival=0.0, wait=Wait(forecast_tokens=100.0))
    soon = make_request(2, arrival=100 * SJF_S_PER_TOKEN - 1, wait=Wait(forecast_tokens=1.0))
    late = make_request(3, arrival=100 * SJF_S_PER_TOKEN + 1, wait=Wait(forecast_tokens=1.0))
    assert _drain(_filled("sjf", long, soon, late)) == [2, 1, 3]


def test_edf_goes_by_the_latest_start() -> None:
    """The request that must start first goes first; one without a deadline waits longer, but not forever."""
    relaxed = make_request(1, wait=Wait(latest_start=50.0))
    urgent = make_request(2, wait=Wait(latest_start=5.0))
    none = make_request(3, arrival=0.0)
    much_later = make_request(4, wait=Wait(latest_start=500.0))
    assert _drain(_filled("edf", relaxed, urgent, none, much_later)) == [2, 1, 3, 4]


def test_lpm_prefers_cached_prefixes_but_passes_nobody_for_ever() -> None:
    """The longest cached prefix goes first; a request passed over MAX_PASSED times goes next in any case."""
    queue = LongestPrefixQueue(64)
    count = 2 * LongestPrefixQueue.MAX_PASSED
    for sequence in range(count):
        queue.push(make_request(sequence))
    order = _drain(queue, {sequence: sequence for sequence in range(1, count)})
    assert order.index(0) == LongestPrefixQueue.MAX_PASSED
    assert sorted(order) == list(range(count))


def test_lpm_counts_admissions_only() -> None:
    """A request that is looked at and put back, because there is no room, passes no other one over."""
    queue = LongestPrefixQueue(64)
    for sequence in range(3):
        queue.push(make_request(sequence))
    for _ in range(2 * LongestPrefixQueue.MAX_PASSED):
        request = queue.take(lambda request: request.sequence)
        assert request is not None
        assert request.sequence == 2
        queue.push(request)


def test_lpm_admits_the_longest_cached_prefix_also_among_prompts_of_equal_length() -> None:
    """The part of a plan for short prompts, which comes first, does not admit them in arrival order."""
    families = [[10 * family + token for token in range(8)] for family in range(2)]
    cluster = Cluster(max_num_seqs=1, max_num_batched_tokens=64, policy="lpm", prefix_cache="hash")
    cluster.join(ModelWorker(b"w", num_blocks=8, block_size=4, max_rows=1))
    for stream, family in enumerate((0, 1, 0, 1, 0)):
        cluster.submit(stream, [*families[family], 100 + stream], 4)
    cluster.run()
    assert [admission.stream for plan in cluster.plans for admission in plan.admissions] == [0, 2, 4, 1, 3]


def test_fair_admits_the_longest_cached_prefix_of_the_tenant_whose_turn_it_is() -> None:
    """The order between tenants does not depend on the cache."""
    queue = Line("fair")
    for sequence, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        queue.push(make_request(sequence, prompt=10, tenant=tenant))
    cached = {1: 0, 2: 0, 3: 8, 4: 9}
    first = queue.take(lambda request: cached[request.sequence])
    assert first is not None
    queue.policy.served(first.account, prompt_tokens=10)
    second = queue.take(lambda request: cached[request.sequence])
    assert second is not None
    assert (first.sequence, second.sequence) == (3, 4)


def test_lpm_looks_up_no_prefix_while_all_rows_are_taken() -> None:
    """A plan that can admit nothing costs the same under `lpm` and under `fcfs`."""
    calls = {}
    for policy in ("fcfs", "lpm"):
        cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64, policy=policy)
        cluster.join(ModelWorker(b"w", num_blocks=64, block_size=4, max_rows=2))
        for stream in range(100):
            cluster.submit(stream, [stream] * 8, 50)
        for _ in range(4):
            cluster.plan()
            cluster.answer()
        now = cluster.core.next_plan_due(cluster.now) or cluster.now
        calls[policy] = count_calls(lambda now=now, core=cluster.core: core.plan(b"w", now))  # type: ignore[misc]
    assert calls["lpm"] < calls["fcfs"] + 20


def test_edf_serves_a_late_request_after_those_that_can_be_in_time() -> None:
    """It ranks behind requests that were present with no more slack; a preemption does not delay it again."""
    late = make_request(1, arrival=0.0, wait=Wait(latest_start=100.0))
    rivals = [make_request(number, arrival=50.0, wait=Wait(latest_start=150.0 + number)) for number in (2, 3)]
    late.late_rank = late_rank(late, 100.5)
    late.wait.latest_start = None
    newcomer = make_request(4, arrival=90.0, wait=Wait(latest_start=1000.0))
    assert _drain(_filled("edf", late, *rivals, newcomer)) == [2, 3, 1, 4]


def test_lpm_keeps_the_place_of_what_is_given_back() -> None:
    """A request that did not fit is offered again, and an ended request is never offered."""
    queue = LongestPrefixQueue(64)
    requests = [make_request(sequence) for sequence in range(5)]
    for request in requests:
        queue.push(request)
    first = queue.take(lambda _: 0)
    assert first is requests[0]
    queue.push(first)
    queue.discard(requests[1])
    assert _drain(queue) == [0, 2, 3, 4]


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 10_000), weight=st.sampled_from([1.0, 2.0, 5.0]))
def test_fair_keeps_backlogged_tenants_within_the_published_bound(seed: int, weight: float) -> None:
    """Between two tenants that always wait, weighted service differs by at most 2 x the largest request's cost."""
    rng = random.Random(seed)
    queue = Line("fair", {"a": weight})
    sequence = 0
    served = {"a": 0.0, "b": 0.0}
    largest = 0.0
    for tenant in ("a", "b"):
        for _ in range(400):
            sequence += 1
            queue.push(make_request(sequence, tenant=tenant, limit=10 + rng.randint(1, 50 if tenant == "a" else 5)))
    for _ in range(200):
        request = queue.take()
        assert request is not None
        outputs = request.limit - request.spec.num_prompt_tokens
        cost = FairPolicy.INPUT_WEIGHT * 10 + FairPolicy.OUTPUT_WEIGHT * outputs
        queue.policy.served(request.account, prompt_tokens=10, output_tokens=outputs)
        served[request.spec.tenant] += cost / (weight if request.spec.tenant == "a" else 1.0)
        largest = max(largest, cost)
        assert abs(served["a"] - served["b"]) <= 2 * largest


def test_fair_does_not_save_idleness_up() -> None:
    """A tenant that was absent does not catch up on service that it did not request."""
    queue = Line("fair")
    for sequence in range(100):
        queue.push(make_request(sequence, tenant="busy"))
    for _ in range(50):
        request = queue.take()
        assert request is not None
        queue.policy.served(request.account, output_tokens=10)
    for sequence in range(100, 200):
        queue.push(make_request(sequence, tenant="back"))
    tenants = []
    for _ in range(20):
        request = queue.take()
        assert request is not None
        queue.policy.served(request.account, output_tokens=10)
        tenants.append(request.spec.tenant)
    assert 9 <= tenants.count("back") <= 11


@pytest.mark.parametrize("returns_last", [False, True])
def test_fair_saves_no_idleness_up_while_no_request_waits(returns_last: bool) -> None:
    """A tenant that begins to wait while no other waits starts with the service of the tenant that waited last.

    Otherwise the others would wait until it has caught up.
    """
    line = Line("fair")
    for sequence in range(50):
        line.push(make_request(sequence, tenant="busy"))
        assert line.take() is not None
        line.policy.served(Account("", "busy"), output_tokens=10)
    names = ["busy", "back"] if returns_last else ["back", "busy"]
    for sequence in range(100, 140):
        line.push(make_request(sequence, tenant=names[sequence % 2]))
    tenants = []
    for _ in range(20):
        request = line.take()
        assert request is not None
        line.policy.served(request.account, output_tokens=10)
        tenants.append(request.spec.tenant)
    assert 9 <= tenants.count("back") <= 11


def test_fair_remembers_tenants_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of tenants that come, are served and leave, the stored data is bounded."""
    monkeypatch.setattr(ServiceLedger, "MAX_IDLE", 10)
    line = Line("fair")
    assert isinstance(line.policy, FairPolicy)
    patient = make_request(0, tenant="patient")
    line.push(patient)
    for sequence in range(1, 1000):
        request = make_request(sequence, tenant=f"tenant-{sequence}")
        line.push(request)
        line.policy.served(request.account, output_tokens=sequence)
        line.discard(request)
        assert len(line.policy.ledger) <= 12
    assert line.take() is patient


def test_fair_keeps_no_queues_of_tenants_whose_requests_end_before_they_are_taken() -> None:
    """Under `fair`, the memory for queues follows the waiting requests, also when they end before admission.

    Without a worker they end one after the other; the rest is served as usual.
    """
    line = Line("fair")
    waiting = make_request(0, tenant="patient")
    line.push(waiting)
    before = _num_queues()
    for sequence in range(1, 1000):
        request = make_request(sequence, tenant=f"tenant-{sequence}")
        line.push(request)
        line.discard(request)

    assert _num_queues() - before < 200
    assert [line.take(), line.take()] == [waiting, None]


def _num_queues() -> int:
    """Return how many tenants have their own queue, over all queues."""
    return sum(isinstance(each, KeyedQueue) for each in gc.get_objects())


def test_fair_charges_for_what_was_computed() -> None:
    """Cached prompt tokens cost their tenant nothing, so its next turn comes earlier."""
    cluster = Cluster(policy="fair", max_num_seqs=1, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w/1", 100, 4, 8))
    cluster.submit(0, [*range(40)], 1, tenant="c")
    cluster.run()
    cluster.effects.clear()
    for stream, tenant in ((1, "a"), (2, "b"), (3, "b"), (4, "a")):
        cluster.submit(stream, [*range(40), 9] if tenant == "a" else [stream, *range(40)], 2, tenant=tenant)
    cluster.run()
    assert [effect.stream for effect in cluster.effects if isinstance(effect, ef.RequestEnded)] == [1, 2, 4, 3]


def test_each_request_class_has_an_order_of_its_own() -> None:
    """Within a class its policy decides; requests without a known class follow the general policy."""
    classes = {"urgent": RequestClass(policy="edf"), "bulk": RequestClass(policy="priority")}
    queue = Line("fcfs", classes=classes)
    for request in (
        make_request(1, request_class="urgent", wait=Wait(latest_start=9.0)),
        make_request(2, request_class="urgent", wait=Wait(latest_start=5.0)),
        make_request(3, request_class="bulk", priority=0),
        make_request(4, request_class="bulk", priority=5),
        make_request(5, request_class="nobody knows it"),
        make_request(6),
    ):
        queue.push(request)
    order = _drain(queue)
    for first, second in ((2, 1), (4, 3), (5, 6)):
        assert order.index(first) < order.index(second)


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 10_000), weight=st.sampled_from([1.0, 3.0]))
def test_request_classes_share_the_service_by_weight(seed: int, weight: float) -> None:
    """Between two classes that always wait, weighted service differs by at most 2 x the largest request's cost."""
    rng = random.Random(seed)
    classes = {"a": RequestClass(policy="sjf", weight=weight), "b": RequestClass(policy="lpm")}
    queue = Line("fcfs", classes=classes)
    for sequence in range(400):
        queue.push(make_request(sequence, request_class="ab"[sequence % 2]))
    served = {"a": 0.0, "b": 0.0}
    largest = 0.0
    for _ in range(100):
        request = queue.take()
        assert request is not None
        outputs = rng.randint(1, 50)
        queue.policy.served(request.account, output_tokens=outputs)
        served[request.spec.request_class] += (
            FairPolicy.OUTPUT_WEIGHT * outputs / classes[request.spec.request_class].weight
        )
        largest = max(largest, FairPolicy.OUTPUT_WEIGHT * outputs)
        assert abs(served["a"] - served["b"]) <= 2 * largest


@pytest.mark.parametrize(("request_class", "pauses"), [("bulk", True), ("", False), ("unknown", False)])
def test_an_urgent_request_pauses_only_its_own_class(request_class: str, pauses: bool) -> None:
    """Between classes the weights decide; priority counts within one."""
    cluster = Cluster(
        policy="priority", classes={"bulk": RequestClass(policy="priority")}, max_num_seqs=1, max_num_batched_tokens=16
    )
    cluster.join(ModelWorker(b"w", num_blocks=64, block_size=4, max_rows=4))
    first = cluster.submit(1, [1] * 4, 40, request_class="bulk")
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    urgent = cluster.submit(2, [2] * 4, 2, priority=90, request_class=request_class)
    cluster.run()
    assert urgent.end is not None
    assert first.end is not None
    assert (first.end.preemptions > 0) == pauses


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "edf", "fair", "lpm"])
def test_requests_that_end_while_waiting_are_never_offered(policy: str) -> None:
    """However many queued requests end while waiting, each of the others is offered once."""
    requests = [make_request(sequence, tenant=f"t{sequence % 3}") for sequence in range(300)]
    queue = _filled(policy, *requests)
    for request in requests[::2]:
        queue.discard(request)
    assert len(queue) == 150
    assert sorted(_drain(queue)) == list(range(1, 300, 2))
    assert len(queue) == 0


def test_a_queue_without_live_requests_keeps_none_that_have_ended() -> None:
    """Requests that end while waiting release their tokens with the last of them, not when the queue is next used."""
    queue = KeyedQueue(fcfs_key)
    requests = [make_request(sequence) for sequence in range(10)]
    for request in requests:
        queue.push(request)
    for request in requests:
        request.state = RequestState.FINISHED
        queue.discard(request)

    assert not [each for each in gc.get_referrers(*requests) if isinstance(each, tuple)]


def test_a_large_request_is_overtaken_within_its_bound_only() -> None:
    """At most MAX_OVERTAKEN small requests overtake a large one that does not fit."""
    cluster = Cluster(max_num_seqs=4, max_num_batched_tokens=16, capacity="guaranteed_no_evict")
    cluster.join(ModelWorker(b"w/1", 40, 4, 8))
    first = cluster.submit(0, [1] * 20, 80)
    cluster.plan()
    large = cluster.submit(1, [2] * 100, 5)
    small = [cluster.submit(stream, [3, stream, 3, 3], 4) for stream in range(2, 60)]
    while first.end is None:
        cluster.plan()
        assert cluster.answer()
    assert not large.tokens
    assert sum(bool(reader.tokens) for reader in small) == MAX_OVERTAKEN
    cluster.run()
    assert all(reader.end is not None for reader in cluster.readers.values())


def test_requests_assigned_to_another_worker_overtake_within_the_bound_too() -> None:
    """A request that lacks memory is passed by at most MAX_OVERTAKEN small ones if another worker takes them."""
    cluster = Cluster(policy="fcfs", max_num_seqs=64, max_num_batched_tokens=64, capacity="guaranteed_no_evict")
    cluster.join(ModelWorker(b"w/1", 120, 4, 64), "w1")
    busy = [cluster.submit(stream, [stream] * 4, 60) for stream in range(100, 108)]
    cluster.plan()
    cluster.answer()
    cluster.join(ModelWorker(b"w/2", 80, 4, 64), "w2")
    cluster.submit(1, [1] * 20, 200)
    cluster.plan()
    cluster.answer()
    large = cluster.submit(2, [2] * 20, 270)
    small: list[Reader] = []
    while all(reader.end is None for reader in busy):
        small += [cluster.submit(200 + len(small), [3, 3, len(small)], 1) for _ in range(2)]
        cluster.plan_for(b"w/1")
        cluster.plan_for(b"w/2")
        assert cluster.answer()
    assert not large.tokens
    assert 0 < sum(bool(reader.tokens) for reader in small) <= MAX_OVERTAKEN


def test_an_urgent_request_pauses_one_that_ranks_behind_it() -> None:
    """When only the row limit binds, a high priority pauses a low one, which then finishes with the same tokens."""
    cluster = Cluster(policy="priority", max_num_seqs=2, max_num_batched_tokens=16)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    low = [cluster.submit(stream, [stream, 1], 40) for stream in range(2)]
    for _ in range(5):
        cluster.plan()
        cluster.answer()
    urgent = cluster.submit(9, [9, 9], 3, priority=5)
    for _ in range(8):
        cluster.plan()
        cluster.answer()
    assert urgent.end is not None
    assert all(reader.end is None for reader in low)
    cluster.run()
    assert sorted(reader.end.preemptions for reader in low if reader.end) == [0, 1]


def test_a_missed_target_preempts_no_request() -> None:
    """Under edf, a request that cannot meet its target any more waits like one without a target."""
    cluster = Cluster(policy="edf", max_num_seqs=1, max_num_batched_tokens=16)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    running = cluster.submit(1, [1, 1], 40)
    for _ in range(5):
        cluster.plan()
        cluster.answer()
    late = cluster.submit(2, [2, 2], 3, ttft_deadline=cluster.now - 1.0)
    cluster.run()

    assert running.end is not None
    assert running.end.preemptions == 0
    assert late.end is not None


def test_a_small_difference_preempts_no_request() -> None:
    """Within the threshold nothing is paused, so equals do not pause each other in turn."""
    cluster = Cluster(policy="priority", max_num_seqs=1, max_num_batched_tokens=16)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    for stream in range(6):
        cluster.submit(stream, [stream, 1], 10)
        cluster.plan()
        cluster.answer()
    cluster.run()
    assert all(reader.end and reader.end.preemptions == 0 for reader in cluster.readers.values())


@pytest.mark.parametrize("target", ["ttft_deadline", "total_deadline"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle worker", "busy worker"])
def test_edf_serves_what_misses_its_target(target: str, busy: bool) -> None:
    """A target that cannot be met ends nothing: the request is served."""
    cluster = Cluster(policy="edf", max_num_seqs=1, max_num_batched_tokens=16, policy_preemption="off")
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(0, [1, 2], 30)
    cluster.run()
    if busy:
        cluster.submit(1, [1, 2], 30)
        cluster.plan()
    late = cluster.submit(2, [1, 2], 30, **{target: cluster.now - 1.0})  # type: ignore[arg-type]
    cluster.run()

    assert late.end is not None
    assert (late.end.reason, len(late.tokens)) == (ef.EndReason.LENGTH, 30)


def test_edf_admits_requests_first_that_can_meet_their_targets() -> None:
    """Under `edf`, a request that has missed its target runs after one that has not, even if its target was earlier.

    It counts as one without a target, so newer requests overtake it for a bounded time only.
    """
    cluster = Cluster(policy="edf", max_num_seqs=1, max_num_batched_tokens=16, policy_preemption="off")
    cluster.submit(1, [1, 2], 5, ttft_deadline=cluster.now - 1.0)
    cluster.submit(2, [1, 2], 5, ttft_deadline=cluster.now + 30.0)
    cluster.submit(3, [1, 2], 5, ttft_deadline=cluster.now + 90.0)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.run()
    ends = [effect.stream for effect in cluster.effects if isinstance(effect, ef.RequestEnded)]
    assert ends == [2, 1, 3]


def test_edf_refuses_what_cannot_meet_its_deadline() -> None:
    """A request that has not started ends with DEADLINE and a reason when its forecast exceeds its deadline."""
    cluster = Cluster(policy="edf", max_num_seqs=2, max_num_batched_tokens=16)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(0, [1, 2], 30)
    cluster.run()
    cluster.submit(1, [1, 2], 200)
    cluster.plan()
    late = cluster.submit(2, [1, 2], 30, deadline=cluster.now + 0.01, total_deadline=cluster.now + 9.0)
    cluster.answer()
    cluster.plan()
    assert late.end is not None
    assert late.end.reason is ef.EndReason.DEADLINE
    assert "forecast" in late.end.message


def _candidates(*columns: tuple[float, ...]) -> Candidates:
    """From (row, rank, sequence, blocks, computed tokens) of each."""
    rows, ranks, sequences, num_blocks, num_computed = np.array(columns).T
    return Candidates(
        rows.astype(np.intp),
        ranks,
        sequences.astype(np.int64),
        num_blocks.astype(np.int32),
        num_computed.astype(np.int32),
    )


def test_fewest_takes_one_victim_where_one_is_enough() -> None:
    """The default rule pauses a single sufficient request: for a row the cheapest, for memory the largest."""
    candidates = _candidates((0, 9, 1, 2, 10), (1, 8, 2, 7, 90), (2, 7, 3, 6, 50))

    def chosen(need_blocks: int, rule: str, threshold: float = 5.0) -> list[int]:
        return choose_victims(candidates, need_blocks=need_blocks, rule=rule, threshold=threshold)

    assert chosen(0, "fewest") == [0]
    assert chosen(5, "fewest") == [1]
    assert chosen(8, "fewest") == [1, 2]
    assert chosen(5, "youngest") == [2]
    assert chosen(5, "lowest_priority") == [0, 1]
    assert chosen(50, "fewest") == []


def test_fewest_spares_those_who_would_pause_others_in_their_turn() -> None:
    """A victim that another candidate ranks behind by more than the threshold would only pass the pause on."""
    candidates = _candidates((0, 30, 1, 4, 90), (1, 20, 2, 9, 10), (2, 26, 3, 3, 80))
    assert choose_victims(candidates, need_blocks=3, rule="fewest", threshold=5.0) == [0]
    assert choose_victims(candidates, need_blocks=0, rule="fewest", threshold=5.0) == [2]
    assert choose_victims(candidates, need_blocks=3, rule="fewest", threshold=10.0) == [1]


def test_a_tenants_bucket_may_be_emptied_but_not_overdrawn() -> None:
    """A request whose tenant has an exactly empty bucket may start; the next one waits for the refill."""
    tenants = Tenants({"a": TenantLimits(tokens_per_s=1.0)})
    first, second, third = (make_request(sequence, tenant="a") for sequence in range(3))
    for request in (first, second, third):
        tenants.arrived(request, 0.0)
    tenants.started(first, 0.0, 0.0)  # A prompt of 10 tokens, which the bucket refills in ten seconds.
    assert tenants.may_run(second, 0.0)
    tenants.started(second, 0.0, 0.0)
    assert not tenants.may_run(third, 9.5)
    assert tenants.may_run(third, 10.0)


@pytest.mark.parametrize(
    "limits",
    [TenantLimits(max_running=1), TenantLimits(tokens_per_s=2.0), TenantLimits(max_queued=1, tokens_per_s=2.0)],
)
def test_tenants_that_never_come_back_are_forgotten(limits: TenantLimits) -> None:
    """The memory for tenants follows those with a request or an unfilled bucket; no debt is forgotten."""
    tenants = Tenants({"": limits})
    owing = make_request(tenant="owing", prompt=1000)
    tenants.arrived(owing, 0.0)
    tenants.started(owing, 0.0, 0.0)
    tenants.ended(owing, 0.0, was_running=True)
    most = 0
    for number in range(1000):
        request, now = make_request(tenant=f"tenant-{number}", generated=5), number / 5
        tenants.arrived(request, now)
        tenants.started(request, 5.0, now)
        tenants.ended(request, now, was_running=True)
        most = max(most, len(tenants))

    assert most <= 2 * 64
    # 1000 tokens from a bucket of 20 that refills at 2 per second.
    other = make_request(tenant="owing")
    assert tenants.may_run(other, 200.0) == (not limits.tokens_per_s)
    assert tenants.may_run(other, 490.0)


def _busy(**limits: object) -> Cluster:
    """A worker with one row that has measured requests of 50 tokens, one after the other."""
    cluster = Cluster(**({"max_num_seqs": 1, "max_num_batched_tokens": 64} | limits))
    cluster.join(ModelWorker(b"w/1", 400, 4, 1))
    for stream in range(100, 106):
        cluster.submit(stream, [1, 2, 3], 50)
    cluster.run()
    for stream in range(200, 210):
        cluster.submit(stream, [1, 2, 3], 50)
    cluster.plan()
    cluster.answer()
    return cluster


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    """A request that cannot meet its deadline is refused at once, with the reason and a retry delay.

    A request with enough time, or in an empty queue, is accepted.
    """
    cluster = _busy()

    hopeless = cluster.submit(1, [1, 2, 3], 50, deadline=cluster.now + 0.06)
    hopeful = cluster.submit(2, [1, 2, 3], 50, deadline=cluster.now + 100.0)

    assert hopeless.end is not None
    assert hopeless.end.reason is ef.EndReason.DEADLINE
    assert "cannot be met" in hopeless.end.message
    assert hopeless.end.retry_ms > 0
    assert hopeful.end is None
    cluster.run()
    assert len(hopeful.tokens) == 50
    alone = cluster.submit(3, [1, 2, 3], 5, deadline=cluster.now + 0.001)
    assert alone.end is None


def test_pushback_is_what_the_queue_takes() -> None:
    """The retry delay of a refused client is the time until the requests before it have started."""
    cluster = _busy(max_queued_requests=10)
    cluster.submit(1, [1, 2, 3], 50)
    refused = cluster.submit(2, [1, 2, 3], 50)
    assert refused.end is not None
    assert refused.end.reason is ef.EndReason.QUEUE_FULL
    waited = cluster.now
    while not cluster.readers[1].tokens:
        cluster.plan()
        cluster.answer()

    assert refused.end.retry_ms / 1000 == pytest.approx(cluster.now - waited, rel=0.5)


def test_requests_that_are_refused_together_cost_one_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may have hundreds of choices, and a refusal must be cheaper than a request."""
    cluster = _busy(max_queued_requests=1)
    cluster.submit(1, [1, 2, 3], 50)
    forecasts, predict = [], Forecast.predict

    def count(self: Forecast, *arguments: Any) -> Prediction | None:
        forecasts.append(arguments)
        return predict(self, *arguments)

    monkeypatch.setattr(Forecast, "predict", count)
    spec = RequestSpec(request_id="r", num_prompt_tokens=1, max_tokens=5)
    ends = []
    for stream in range(100, 200):
        event = ev.RequestArrived(
            frontend=FRONTEND, stream=stream, spec=spec, token_ids=np.array([1], np.int32), credit=100
        )
        ends += [each for each in cluster.core.handle(event, cluster.now) if isinstance(each, ef.RequestEnded)]

    assert [each.reason for each in ends] == [ef.EndReason.QUEUE_FULL] * 100
    assert len({each.retry_ms for each in ends}) == len(forecasts) == 1
    assert ends[0].retry_ms > 0


@pytest.mark.parametrize("policy", ["priority", "sjf"])
def test_only_fcfs_refuses_by_the_predicted_wait(policy: str) -> None:
    """Other orders have no forecast of the wait, so a deadline refuses a request only once it is near."""
    cluster = Cluster(policy=policy)
    cluster.submit(1, [1], 9)
    reader = cluster.submit(2, [1], 9, deadline=cluster.now + 0.5)
    assert reader.end is None


def test_requests_of_unknown_classes_share_one_class() -> None:
    """All requests that name no configured class belong to the same class."""
    config = CoreConfig(classes={"a": RequestClass(policy="fcfs")})
    assert config.same_class("a", "a")
    assert config.same_class("x", "y")
    assert not config.same_class("a", "x")
    assert not config.same_class("x", "a")


def test_the_number_of_an_unused_account_is_reused() -> None:
    """The number of an account without requests goes to the next account, however often it changes."""
    numbers = AccountNumbers()
    for tenant in "abcd":
        number = numbers.enter(Account("", tenant))
        assert (number, numbers[number].tenant) == (0, tenant)
        numbers.leave(number)


def test_the_longest_prefix_is_searched_in_a_window() -> None:
    """Only the oldest requests are ranked, and no request is lost when one is put back."""
    queue = LongestPrefixQueue(64)
    for sequence in range(80):
        queue.push(make_request(sequence))
    ranked: set[int] = set()

    def cached(request: Request) -> int:
        ranked.add(request.sequence)
        return 0

    first = queue.take(cached)
    assert ranked == set(range(64))
    second = queue.take(cached)
    assert first is not None
    assert second is not None
    queue.take(cached)
    queue.push(second)
    queue.push(first)
    assert len(queue) == 79
    taken = [request.sequence for _ in range(79) if (request := queue.take(lambda _: 0)) is not None]
    assert taken == [0, 1, *range(3, 80)]


def test_tenants_take_turns_within_a_fair_class() -> None:
    """The service of a tenant also counts within a request class with the order `fair`."""
    policy = make_policy("fcfs", {}, {"c": RequestClass(policy="fair")})
    queue = policy.make_queue()
    for sequence, tenant in ((1, "a"), (2, "b")):
        policy.enter(Account("c", tenant))
        queue.push(make_request(sequence, request_class="c", tenant=tenant))
    policy.served(Account("c", "a"), prompt_tokens=10)
    served = queue.take(lambda _: 0)
    assert served is not None
    assert served.spec.tenant == "b"


@given(
    st.sampled_from(["fcfs", "priority", "sjf", "edf", "fair", "lpm"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(1, 50),
    st.data(),
)
@settings(max_examples=examples(60))
def test_a_queue_shows_the_order_in_which_it_is_taken(
    name: str, priorities: list[int], most: int, data: st.DataObject
) -> None:
    """Without further service, requests are taken as listed by `first_ones`; finished requests are not listed."""
    policy = make_policy(name, {}, {})
    queue = policy.make_queue()
    requests = [make_request(number, tenant=f"t{number % 3}", priority=p) for number, p in enumerate(priorities)]
    for request in requests:
        queue.push(request)
    for request in data.draw(st.lists(st.sampled_from(requests), unique_by=id, max_size=5)):
        request.state = RequestState.FINISHED
        queue.discard(request)
    shown = queue.first_ones(most)
    taken = list(iter(lambda: queue.take(lambda _: 0), None))
    assert shown == taken[:most]


def test_a_tenants_held_backlog_changes_nothing_for_other_tenants() -> None:
    """Requests held for a quota count neither in others' waiting-time forecasts nor in their learning data."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, tenant_limits={"bulk": TenantLimits(max_running=1)})
    cluster.join(ModelWorker(b"w", num_blocks=256, block_size=4, max_rows=8))
    for stream in range(100, 140):
        cluster.submit(stream, [stream] * 8, 20, tenant="bulk")
    for _ in range(30 * 20):
        cluster.plan()
        cluster.answer()
        cluster.now += 0.02
    for stream in range(200, 600):
        cluster.submit(stream, [stream] * 8, 20, tenant="bulk")
    reader = cluster.submit(1, [7] * 8, 20, tenant="chat", deadline=cluster.now + 20.0)
    assert reader.end is None
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    assert reader.tokens


def test_a_held_request_does_not_keep_the_floor_low() -> None:
    """A returning tenant gets an equal share, even if a request of a third tenant has been held for long."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=64, policy="fair", prefix_cache="off")
    cluster.join(ModelWorker(b"w1", num_blocks=64, block_size=16, max_rows=2), "w1")
    owners: dict[int, str] = {}

    def keep_waiting(tenant: str) -> None:
        while sum(owner == tenant and cluster.readers[s].end is None for s, owner in owners.items()) < 4:
            stream = len(owners) + 1
            owners[stream] = tenant
            cluster.submit(stream, [stream % 900] * 8, 20, tenant=tenant)

    def served(tenant: str) -> int:
        return sum(len(cluster.readers[stream].tokens) for stream, owner in owners.items() if owner == tenant)

    keep_waiting("z")
    owners[9000] = "x"
    cluster.submit(9000, [1] * 8, 5, tenant="x", grammar=b"slow")
    for _ in range(300):
        keep_waiting("z")
        cluster.plan()
        cluster.answer()
    before = served("z")
    for _ in range(200):
        keep_waiting("z")
        keep_waiting("y")
        cluster.plan()
        cluster.answer()
    assert served("y") == pytest.approx(served("z") - before, abs=40)


SYSTEM = list(range(1, 161))
"""A prefix of ten blocks of 16 tokens."""


def _preempted(cluster: Cluster) -> list[int]:
    return [note.stream for note in cluster.notes if note.kind is NoteKind.PREEMPTED]


def test_an_urgent_request_preempts_no_other_for_blocks_that_it_shares() -> None:
    """It lacks one of eleven blocks; six are free."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=256, policy="priority")
    cluster.join(ModelWorker(b"w1", num_blocks=40, block_size=16, max_rows=8, max_tokens_per_step=256))
    for stream in (1, 2, 3):
        cluster.submit(stream, SYSTEM + [stream] * 20 if stream == 1 else [200 + stream] * 160, 60)
    for _ in range(8):
        cluster.plan()
        cluster.answer()
    reader = cluster.submit(9, [*SYSTEM, 9], 10, priority=9)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    assert reader.tokens
    assert not _preempted(cluster)


def test_a_victim_is_chosen_by_the_blocks_that_it_alone_holds() -> None:
    """Of two requests that share most blocks and one that shares none, the latter is preempted, once."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=1024, policy="priority")
    cluster.join(ModelWorker(b"w1", num_blocks=62, block_size=16, max_rows=8, max_tokens_per_step=1024))
    cluster.submit(1, SYSTEM * 4 + [700] * 8, 60)
    for _ in range(3):
        cluster.plan()
        cluster.answer()
    cluster.submit(2, SYSTEM * 4 + [701] * 8, 60)
    cluster.submit(3, [702] * 200, 60)
    for _ in range(6):
        cluster.plan()
        cluster.answer()
    urgent = cluster.submit(9, [900] * 200, 10, priority=9)
    while urgent.end is None:
        cluster.plan()
        cluster.answer()
    assert _preempted(cluster) == [3]


@pytest.mark.parametrize("is_victim", [False, True])
def test_a_victim_does_not_overtake_the_request_that_preempted_it(is_victim: bool) -> None:
    """While the urgent request lacks memory, smaller requests may overtake it, but not the ones preempted for it."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=256)
    cluster.join(ModelWorker(b"w1", num_blocks=24, block_size=4, max_rows=8, max_tokens_per_step=256))
    cluster.submit(1, [1] * 40, 20)
    cluster.plan()
    cluster.submit(2, [2] * 80, 5)
    small = cluster.submit(3, [3] * 4, 5)
    urgent, victim = (cluster.core._requests.get(FRONTEND, stream) for stream in (2, 3))
    assert victim is not None
    victim.wait.behind = urgent if is_victim else None
    for _ in range(10):
        cluster.plan()
        cluster.answer()
    assert bool(small.tokens) != is_victim
    cluster.run()
    assert small.end is not None


def test_slo_serves_requests_last_that_miss_their_target() -> None:
    """Under `slo` every request has a target for its first token, and one that has missed its target runs last."""
    cluster = Cluster(policy="slo", slo_ttft_s=0.5, max_num_seqs=1, max_num_batched_tokens=16, prefix_cache="off")
    late = cluster.submit(1, [1, 2], 1)
    cluster.now += 1.0
    in_time = [cluster.submit(stream, [stream, 2], 1) for stream in range(2, 5)]
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.run()
    ends = [effect.stream for effect in cluster.effects if isinstance(effect, ef.RequestEnded)]
    assert ends == [2, 3, 4, 1]
    assert len(late.tokens) == 1
    assert all(len(each.tokens) == 1 for each in in_time)


@pytest.mark.parametrize(("difference", "is_preempted"), [(0.0, True), (2.0, True), (3.0, False)])
def test_a_request_is_preempted_from_a_difference_in_priority_on(difference: float, is_preempted: bool) -> None:
    """Under `priority` a running request keeps its row if its priority is lower by less than the difference."""
    cluster = Cluster(policy="priority", max_num_seqs=1, preempt_threshold=5.0, preempt_priority_difference=difference)
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    cluster.submit(1, [1, 2, 3], 20, priority=0)
    for _ in range(4):
        cluster.plan()
        cluster.answer()
    cluster.submit(2, [4, 5, 6], 1, priority=2)
    cluster.run()
    preempted = [note for note in cluster.notes if note.kind is NoteKind.PREEMPTED]
    assert bool(preempted) == is_preempted
