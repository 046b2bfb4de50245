"""A request that cannot start holds up no other, and no plan pays for requests or workers that it need not look at."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import TenantLimits
from scheduler_svc.core.workers.grammars import MAX_ASKED
from tests.scheduler_svc.cluster import FRONTEND, Cluster, Reader
from tests.scheduler_svc.requests import make_arrival


def _step(cluster: Cluster, seconds: float = 0.02) -> None:
    cluster.plan()
    cluster.now += seconds
    cluster.answer()
    cluster.handle(ev.TimePassed())


def _ended(readers: list[Reader]) -> int:
    return sum(reader.end is not None for reader in readers)


def _stream_of_short_requests(cluster: Cluster, count: int, **options: object) -> list[Reader]:
    """Submit a short request before each of `count` steps."""
    readers = []
    for stream in range(1000, 1000 + count):
        readers.append(cluster.submit(stream, [7, 8, stream % 900], 2, **options))  # type: ignore[arg-type]
        _step(cluster)
    return readers


@pytest.mark.parametrize("num_waiting", [1, 8])
def test_a_tenant_at_its_limit_of_running_requests_holds_up_no_other(num_waiting: int) -> None:
    """Its requests wait apart; another tenant's run in the free rows, however many and however long."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, tenant_limits={"a": TenantLimits(max_running=1)})
    cluster.join(ModelWorker(b"w", 500, 4, 8))
    limited = [cluster.submit(stream, [1, 2, 3], 300, tenant="a") for stream in range(1 + num_waiting)]
    _step(cluster)
    others = _stream_of_short_requests(cluster, 60, tenant="b")
    assert _ended(others) >= 58
    assert _ended(limited) == 0
    cluster.run()
    assert _ended(limited) == 1 + num_waiting


def test_a_tenant_over_its_token_rate_holds_up_no_other() -> None:
    """Its request starts when the rate allows it, without another event; until then the worker serves the others."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64, tenant_limits={"a": TenantLimits(tokens_per_s=4.0)})
    cluster.join(ModelWorker(b"w", 500, 4, 8))
    cluster.submit(1, [1] * 39, 9, tenant="a")  # Takes 48 tokens from a bucket of 40.
    cluster.run()
    late = cluster.submit(2, [1, 2, 3], 2, tenant="a")
    others = _stream_of_short_requests(cluster, 50, tenant="b")
    assert _ended(others) >= 48
    assert not late.tokens
    cluster.now += 2.0
    _step(cluster)
    _step(cluster)
    assert late.tokens


def test_the_most_urgent_request_of_a_limited_tenant_goes_first() -> None:
    """Requests that wait for their tenant's limit keep the policy's order, even relative to later ones."""
    cluster = Cluster(
        policy="priority", max_num_seqs=4, max_num_batched_tokens=64, tenant_limits={"a": TenantLimits(max_running=1)}
    )
    cluster.join(ModelWorker(b"w", 500, 4, 8))
    cluster.submit(1, [1], 20, tenant="a")
    _step(cluster)
    readers = {priority: cluster.submit(10 + priority, [2], 4, tenant="a", priority=priority) for priority in (1, 3, 2)}
    finished: list[int] = []
    for _ in range(60):
        _step(cluster)
        finished += [priority for priority, reader in readers.items() if reader.end and priority not in finished]
    assert finished == [3, 2, 1]


def test_a_long_prompt_for_a_busy_worker_does_not_idle_the_others() -> None:
    """A request whose context length only one worker supports waits for that worker; the others serve what they can."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=512)
    cluster.join(ModelWorker(b"small", 400, 4, 2, max_model_len=100), "small")
    cluster.join(ModelWorker(b"large", 400, 4, 2, max_model_len=1000), "large")
    running = [cluster.submit(stream, [stream + 1] * 200, 500) for stream in (1, 2)]
    _step(cluster)
    waiting = cluster.submit(3, [9] * 200, 4)
    others = _stream_of_short_requests(cluster, 40)
    assert _ended(others) >= 38
    assert not waiting.tokens
    cluster.run()
    assert _ended([*running, waiting]) == 3


def test_requests_that_only_some_workers_serve_keep_their_order() -> None:
    """A worker that serves both kinds of requests takes them in policy order."""
    cluster = Cluster(max_num_seqs=2, max_num_batched_tokens=512)
    cluster.join(ModelWorker(b"large", 400, 4, 1, max_model_len=1000), "large")
    cluster.join(ModelWorker(b"small", 400, 4, 1, max_model_len=100), "small")
    busy = [cluster.submit(stream, [stream] * (150 if stream == 1 else 3), 60) for stream in (1, 2)]
    _step(cluster)
    order: list[int] = []
    readers = {stream: cluster.submit(stream, [stream] * (150 if stream % 2 else 3), 40) for stream in range(3, 9)}
    for _ in range(600):
        _step(cluster)
        order += [stream for stream, reader in readers.items() if reader.tokens and stream not in order]
    assert [stream for stream in order if stream % 2] == [3, 5, 7]
    assert [stream for stream in order if not stream % 2] == [4, 6, 8]
    assert _ended(busy) == 2


def test_requests_that_wait_for_their_grammars_hold_up_no_other() -> None:
    """However many grammars are still to be compiled, requests without one run at once."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w", 500, 4, 8))
    cluster.plan()
    for stream in range(600):
        cluster.submit(stream, [1, 2, 3], 5, grammar=b"g%d" % stream, tenant="a")
    others = _stream_of_short_requests(cluster, 20)
    assert _ended(others) >= 18


def test_tenants_take_turns_in_having_their_grammars_compiled() -> None:
    """One tenant's many grammars delay another tenant's by no more than a worker is asked for at once."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    worker = ModelWorker(b"w", 500, 4, 8)
    cluster.join(worker)
    for stream in range(100):
        cluster.submit(stream, [1, 2, 3], 5, grammar=b"many%d" % stream, tenant="many")
    cluster.submit(100, [1, 2, 3], 5, grammar=b"one", tenant="one")
    cluster.plan()
    asked = 0
    while True:
        wanted = [effect for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]
        if any(effect.grammar == b"one" for effect in wanted):
            break
        cluster.handle(ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=wanted[asked].key))
        asked += 1
    assert asked <= 2
    assert len(wanted) <= MAX_ASKED + asked


def test_a_grammar_is_compiled_by_one_worker_while_that_is_enough() -> None:
    """Only one idle worker compiles a request's grammar, and this worker takes the request."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
    workers = [ModelWorker(b"w%d" % index, 500, 4, 8) for index in range(4)]
    for worker in workers:
        cluster.join(worker, worker.peer.decode())
    reader = cluster.submit(1, [1, 2, 3], 5, grammar=b"g")
    for _ in range(3):
        cluster.plan()
    (wanted,) = [effect for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]
    asked = next(worker for worker in workers if worker.peer == wanted.worker)
    cluster.handle(ev.GrammarReported(worker=asked.peer, epoch=asked.epoch, key=wanted.key))
    cluster.run()
    assert reader.end is not None
    assert len([effect for effect in cluster.effects if isinstance(effect, ef.GrammarWanted)]) == 1


def test_no_row_is_preempted_for_a_request_that_another_worker_has_room_for() -> None:
    """An urgent request goes to the worker with a free row, although a busy worker plans first."""
    cluster = Cluster(policy="priority", preempt_threshold=5.0, max_num_seqs=2, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w0", 500, 4, 2), "w0")
    for stream in (1, 2):
        cluster.submit(stream, [stream] * 4, 100)
    for _ in range(5):
        _step(cluster)
    cluster.join(ModelWorker(b"w1", 500, 4, 2), "w1")
    urgent = cluster.submit(3, [3] * 4, 5, priority=5)
    cluster.plan_for(b"w0")
    for _ in range(3):
        _step(cluster)
    assert urgent.tokens
    assert sum(worker.counters.preemptions for worker in cluster.core.stats().workers) == 0


def test_requests_that_share_a_prefix_under_way_hold_up_no_other() -> None:
    """However many requests wait for one to compute their common prefix, another request starts at once."""
    cluster = Cluster(max_num_seqs=64, max_num_batched_tokens=64, long_prefill_token_threshold=32)
    cluster.join(ModelWorker(b"w", 4000, 4, 64))
    prefix = [5] * 600
    sharing = [cluster.submit(stream, [*prefix, stream], 3) for stream in range(400)]
    cluster.plan_for(b"w", 1)
    other = cluster.submit(1000, [1, 2, 3], 2)
    for _ in range(14):
        _step(cluster)
    assert other.end is not None
    assert _ended(sharing) == 0
    cluster.run()
    assert _ended(sharing) == 400


def test_a_request_that_waits_for_a_prefix_goes_to_an_idle_worker_instead() -> None:
    """Waiting for a prefix is worth it only while no other worker would serve the request sooner."""
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=16)
    cluster.join(ModelWorker(b"w0", 4000, 4, 8), "w0")
    prefix = [5] * 400
    for stream in range(6):
        cluster.submit(stream, [*prefix, stream], 3)
    for stream in range(6, 9):
        cluster.submit(stream, [stream] * 300, 3)
    for _ in range(2):
        _step(cluster)
    cluster.join(ModelWorker(b"w1", 4000, 4, 8), "w1")
    for _ in range(3):
        _step(cluster)
    running = {worker.worker_id: worker.rows_running for worker in cluster.core.stats().workers}
    assert running["w1"] > 0
    cluster.run()


# ---------------------------------------------------------------- cost in Python function calls


@contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # Disable GC, because finalisers of objects from other tests also count as calls.
    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(None)
        gc.enable()


def _calls_of_a_plan(num_workers: int, num_waiting: int, rows: int, prompt: int, blocks: int) -> int:
    """How many calls a worker's plan takes while all workers are full and requests wait."""
    cluster = Cluster(max_num_seqs=rows, max_num_batched_tokens=512)
    for index in range(num_workers):
        cluster.join(ModelWorker(b"w%d" % index, blocks, 16, rows), f"w{index}")
    for stream in range(4 * num_workers):
        cluster.submit(stream, [stream + 1] * prompt, 100)
    for _ in range(3):
        cluster.plan()
        cluster.answer()
    for stream in range(num_waiting):
        cluster.submit(100_000 + stream, [stream + 1] * prompt, 5)
    cluster.plan()
    for answers in cluster.answers.values():
        cluster.core.handle(answers.popleft(), cluster.now)
    peer = b"w%d" % (num_workers - 1)
    with _counting() as calls:
        plan, _ = cluster.core.plan(peer, cluster.now + 10.0)
        taken = calls()
    assert plan is not None
    assert not plan.admissions
    return taken


@pytest.mark.every(3)
@pytest.mark.parametrize(("rows", "prompt", "blocks"), [(4, 4, 200), (16, 140, 44)])
def test_a_plan_costs_no_more_because_other_workers_are_full_too(rows: int, prompt: int, blocks: int) -> None:
    """Whether rows or memory are what lacks, a plan looks at as much with many workers as with a few."""
    few = _calls_of_a_plan(4, 40, rows, prompt, blocks)
    many = _calls_of_a_plan(40, 40, rows, prompt, blocks)
    assert many <= 1.3 * few


def test_an_admission_of_a_burst_costs_as_much_with_many_workers_as_with_a_few() -> None:
    """A burst is shared out among idle workers by looking at each request once or twice."""

    def calls_per_admission(num_workers: int) -> float:
        cluster = Cluster(max_num_seqs=32, max_num_batched_tokens=4096)
        for index in range(num_workers):
            cluster.join(ModelWorker(b"w%d" % index, 800, 16, 32, max_tokens_per_step=4096), f"w{index}")
        for stream in range(16 * num_workers):
            cluster.submit(stream, [stream % 900, stream // 900, *range(30)], 5)
        admitted = 0
        with _counting() as calls:
            for peer in cluster.core.workers():
                plan, _ = cluster.core.plan(peer, cluster.now)
                admitted += 0 if plan is None else len(plan.admissions)
            taken = calls()
        assert admitted >= 8 * num_workers
        return taken / admitted

    assert calls_per_admission(32) <= 1.5 * calls_per_admission(4)


def test_a_tenant_that_is_served_last_costs_no_look_at_all_others() -> None:
    """Under `fair`, a plan costs as much with thousands of tenants as with a few."""

    def calls_per_admission(num_tenants: int) -> float:
        cluster = Cluster(policy="fair", max_num_seqs=8, max_num_batched_tokens=64)
        worker = ModelWorker(b"w", 500, 4, 8)
        cluster.join(worker)
        for stream in range(num_tenants):
            cluster.core.handle(_arrived(stream, f"t{stream}"), cluster.now)
        admitted = taken = 0
        for _ in range(12):
            with _counting() as calls:
                plan, _ = cluster.core.plan(b"w", cluster.now)
                taken += calls()
            if plan is not None:
                admitted += len(plan.admissions)
                answer = worker.execute(plan)
                worker.answered_step = answer.step
                cluster.core.handle(answer, cluster.now)
        return taken / admitted

    few = calls_per_admission(60)
    assert calls_per_admission(3000) <= 1.3 * few


def _arrived(stream: int, tenant: str) -> ev.RequestArrived:
    return make_arrival(FRONTEND, stream, tokens=3, max_tokens=1, tenant=tenant)


@pytest.mark.every(3)
def test_workers_that_are_not_due_are_not_looked_at() -> None:
    """Finding the due workers takes time only for them."""

    def calls(num_workers: int) -> int:
        cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
        for index in range(num_workers):
            cluster.join(ModelWorker(b"w%d" % index, 50, 4, 8), f"w{index}")
        cluster.core.due_workers(cluster.now)
        with _counting() as count:
            assert cluster.core.due_workers(cluster.now) == []
            cluster.core.next_plan_due(cluster.now)
            return count()

    assert calls(300) == calls(3)


def test_a_worker_joins_a_large_fleet_at_the_cost_of_a_small_one() -> None:
    """The work for a join does not grow with the number of workers or waiting requests."""

    def calls(num_workers: int, num_waiting: int) -> int:
        cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=64)
        hellos = [ModelWorker(b"w%d" % index, 50, 4, 8).hello(f"w{index}") for index in range(num_workers + 1)]
        for hello in hellos[:-1]:
            cluster.core.handle(hello, cluster.now)
        for stream in range(num_waiting):
            cluster.core.handle(_arrived(stream, "t"), cluster.now)
        with _counting() as count:
            cluster.core.handle(hellos[-1], cluster.now)
            return count()

    assert calls(200, 1000) == calls(3, 10)
