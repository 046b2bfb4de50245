"""Forecasts, headroom, gates and buckets, each to its boundary."""

import math
from typing import Any

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CAPACITY_MODES, BatchingLimits, CoreConfig, TenantLimits
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.tenants import BURST_S, Tenants
from scheduler_svc.core.workers.batching import BatchGate
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.cost_model import StepShape
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.rows import RowTable
from scheduler_svc.core.workers.speculation import Speculation
from scheduler_svc.core.workers.worker import Worker
from shared.request_spec import RequestSpec
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.operations import count_calls
from tests.scheduler_svc.requests import make_request

# ---------------------------------------------------------------- forecast


def _worker(num_steps: int = 4000) -> Worker:
    """A worker on which a prompt token takes 10 ms and a decode step 20 ms."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w", num_blocks=64, block_size=16, max_rows=4))
    worker = cluster.core.worker(b"w")
    assert worker is not None
    for number in range(num_steps):
        tokens = number % 4 * 50
        worker.costs.measured(StepShape(1, tokens), 0.02 + 0.01 * tokens)
    return worker


class _Fleet(Fleet):
    """A fleet of given workers."""

    def __init__(self, *workers: Worker) -> None:
        super().__init__(CoreConfig(), 1, TokenFacts())
        self._workers = {worker.peer: worker for worker in workers}
        self._changed()


def _forecast(*workers: Worker) -> Forecast:
    return Forecast(_Fleet(*workers), CoreConfig())


def _finish(forecast: Forecast, *lengths: int, **fields: Any) -> None:
    for generated in lengths:
        forecast.lengths.finished(make_request(generated=generated, max_tokens=50, **fields))


def test_a_hint_comes_before_what_was_learned_and_the_limit_bounds_both() -> None:
    """Without either, the limit is all that is known."""
    forecast = _forecast()
    assert forecast.output_tokens(make_request(max_tokens=50)) == 50
    _finish(forecast, *[20] * 8, tenant="a")
    assert forecast.output_tokens(make_request(tenant="a")) == 20
    assert forecast.output_tokens(make_request(tenant="a", max_tokens=5)) == 5
    assert forecast.output_tokens(make_request(tenant="a", expected_output_tokens=7)) == 7
    assert forecast.learned_output_tokens(make_request(tenant="a", expected_output_tokens=7)) == 20
    assert forecast.output_tokens(make_request(tenant="a", expected_output_tokens=70)) == 50


def test_the_latest_start_leaves_time_for_prompt_and_output() -> None:
    """The first token needs the uncached prompt, the last token also the output; the earlier limit counts."""
    assert _forecast().latest_start(make_request(ttft_deadline=100.0), 10) == 100.0, "no worker was measured"
    forecast = _forecast(_worker())
    assert forecast.latest_start(make_request(), 10) is None
    assert forecast.latest_start(make_request(ttft_deadline=100.0), 10) == pytest.approx(100 - 0.1, abs=0.01)
    assert forecast.latest_start(make_request(ttft_deadline=100.0), 1) == pytest.approx(100 - 0.01, abs=0.01)
    assert forecast.latest_start(make_request(ttft_deadline=100.0, generated=1), 10) is None
    total = make_request(total_deadline=100.0)
    assert forecast.latest_start(total, 10) == pytest.approx(100 - 0.1 - 1.0, abs=0.02)
    both = make_request(total_deadline=100.0, ttft_deadline=50.0)
    assert forecast.latest_start(both, 10) == pytest.approx(50 - 0.1, abs=0.01)


@pytest.mark.every(3)
def test_an_arrival_costs_the_same_with_many_workers_and_waiting_requests() -> None:
    """Its forecast looks at a few workers, whether 8 or 64 are there, and 10 or 500 requests wait."""
    calls = {}
    for num_workers, num_waiting in ((8, 10), (64, 10), (64, 500)):
        cluster = Cluster(max_num_seqs=1)
        for number in range(num_workers):
            cluster.join(ModelWorker(b"w%d" % number, num_blocks=64, block_size=16, max_rows=1), f"w{number}")
        for stream in range(num_workers):
            cluster.submit(stream, [stream, 2, 3], 40)
        for _ in range(3):
            cluster.plan()
            cluster.answer()
        for stream in range(num_waiting):
            cluster.submit(1000 + stream, [4, 5, 6], 40)
        arrival = ev.RequestArrived(
            frontend=FRONTEND,
            stream=5000,
            spec=RequestSpec("r5000", 3, 40),
            token_ids=np.array([4, 5, 6], np.int32),
            credit=1000,
        )
        calls[num_workers, num_waiting] = count_calls(
            lambda core=cluster.core, now=cluster.now, event=arrival: core.handle(event, now)  # type: ignore[misc]
        )
    assert len(set(calls.values())) == 1, calls


def test_a_limit_is_no_forecast_that_refuses() -> None:
    """Without a hint or finished requests, only the prompt counts; then the length that nearly all others exceed."""
    forecast = _forecast(_worker())
    unknown = make_request(deadline=100.0)
    assert forecast.must_start(unknown, 10) == pytest.approx(100 - 0.1, abs=0.03)
    hinted = make_request(deadline=100.0, expected_output_tokens=11)
    assert forecast.must_start(hinted, 10) == pytest.approx(100 - 0.1 - 0.2, abs=0.03)
    _finish(forecast, 21, *[40] * 8)
    assert forecast.must_start(unknown, 10) == pytest.approx(100 - 0.1 - 0.4, abs=0.06)


def test_a_forecast_that_refuses_counts_on_all_drafts() -> None:
    """A worker that verifies drafts may generate several tokens per step."""
    worker = _worker()
    worker.speculation = Speculation(4, worker.costs)
    hinted = make_request(deadline=100.0, expected_output_tokens=51)
    assert _forecast(worker).must_start(hinted, 0) == pytest.approx(100 - 0.2, abs=0.05)


@pytest.mark.parametrize("slow_steps", [[10.0, 0.02] * 12, [10.0] * 60])
def test_a_disturbance_is_no_forecast_that_refuses(slow_steps: list[float]) -> None:
    """Steps that a machine under pressure delayed, some or all for minutes, do not show that a deadline is missed."""
    hinted = make_request(deadline=600.0, expected_output_tokens=50)
    disturbed, new = _worker(), _worker(num_steps=10)
    for seconds in slow_steps:
        disturbed.costs.measured(StepShape(1, 0), seconds)
    for _ in range(3):
        new.costs.measured(StepShape(1, 0), 10.0)
    must_start = _forecast(disturbed).must_start(hinted, 10), _forecast(new).must_start(hinted, 10)
    assert all(time is not None and time > 540.0 for time in must_start), must_start


def test_running_requests_are_no_forecast_that_refuses() -> None:
    """A full batch of slow steps may end before most of a request's output is generated, so it does not count."""
    cluster = Cluster(max_num_seqs=32, max_num_batched_tokens=64)
    cluster.join(ModelWorker(b"w", num_blocks=256, block_size=16, max_rows=32))
    worker = cluster.core.worker(b"w")
    assert worker is not None
    for number in range(8000):
        rows = (1, 8, 32)[number // 32 % 3]
        worker.costs.measured(StepShape(rows, number % 2), 0.005 + 0.005 * rows)
    for stream in range(1, 33):
        cluster.submit(stream, [stream] * 2, 20)
    cluster.plan()
    assert worker.rows.num_running == 32
    hinted = make_request(deadline=100.0, expected_output_tokens=201)
    must_start = _forecast(worker).must_start(hinted, 1)
    assert must_start is not None
    assert must_start >= 100 - 200 * 0.01


def test_a_lasting_slowdown_is_a_forecast_that_refuses() -> None:
    """After a thousand slow steps, requests need the time that these took. The fastest worker counts."""
    hinted = make_request(deadline=600.0, expected_output_tokens=51)
    slow = _worker()
    for _ in range(4000):
        slow.costs.measured(StepShape(1, 0), 1.0)
    assert _forecast(slow).must_start(hinted, 0) == pytest.approx(550.0, abs=5.0)
    assert _forecast(slow, _worker()).must_start(hinted, 0) == pytest.approx(599.0, abs=0.5)


# ---------------------------------------------------------------- capacity


def _rows(running: int, limit: int = 17) -> RowTable:
    rows = RowTable(8, 4, 100)
    for _ in range(running):
        rows.occupy(
            make_request(prompt=5, limit=limit),
            limit=limit,
            frontend_index=0,
            blocks=np.arange(2),
            num_computed=0,
            num_shared=0,
            rank=0.0,
        )
    return rows


def _headroom(capacity: Capacity, limit: int = 1 << 15) -> int:
    """How many blocks more than it takes now a request must find, beside four running requests."""
    rows = _rows(4, limit)
    return next(n for n in range(2000) if capacity.admits(rows, num_new=1, worst_blocks=1, num_available=n + 1))


def _released(capacity: Capacity, times: int, *, blocks: int, steps: int) -> None:
    """So many intervals between two releases, in each of which running requests took so many blocks."""
    for _ in range(times):
        for _ in range(steps):
            capacity.step_planned()
        capacity.grew(blocks)
        capacity.released()


@pytest.mark.parametrize("mode", CAPACITY_MODES)
def test_an_empty_worker_takes_whatever_fits(mode: str) -> None:
    """Without a running request neither headroom nor worst case counts."""
    capacity = Capacity(mode, 100)
    _released(capacity, 5, blocks=10, steps=2)
    capacity.preempted(100.0)
    assert capacity.admits(_rows(0), num_new=100, worst_blocks=100, num_available=100)
    assert not capacity.admits(_rows(0), num_new=100, worst_blocks=100, num_available=99)


def test_the_worst_case_of_all_must_fit() -> None:
    """A limit of 17 tokens needs 4 blocks of 4: the last token is never written."""
    capacity = Capacity("guaranteed_no_evict", 20)
    assert capacity.admits(_rows(4), num_new=1, worst_blocks=4, num_available=10)
    assert not capacity.admits(_rows(4), num_new=1, worst_blocks=5, num_available=10)


def test_the_worst_case_follows_requests_that_come_and_go() -> None:
    """Requests of different lengths count as long as they have a row; admission examines no row for this."""
    capacity, rows = Capacity("guaranteed_no_evict", 20), _rows(3, limit=17)
    row = rows.occupy(
        make_request(prompt=5, limit=30),
        limit=30,
        frontend_index=0,
        blocks=np.arange(2),
        num_computed=0,
        num_shared=0,
        rank=0.0,
    )
    # Remove the per-row limits, because this decision must not look them up.
    limits, rows.limit = rows.limit, np.zeros(0, np.int32)
    assert not capacity.admits(rows, num_new=1, worst_blocks=1, num_available=10)
    rows.limit = limits
    rows.vacate(row)
    rows.limit = np.zeros(0, np.int32)
    assert capacity.admits(rows, num_new=1, worst_blocks=8, num_available=10)
    assert not capacity.admits(rows, num_new=1, worst_blocks=9, num_available=10)


def test_the_headroom_is_what_running_requests_take_until_one_ends() -> None:
    """Its size follows from the growth between two releases, their distance, and what a preemption costs."""
    capacity = Capacity("max_utilization", 1000)
    assert _headroom(capacity) == 0
    _released(capacity, 1, blocks=12, steps=5)
    # A preemption counts as twice the assumed step duration.
    assert _headroom(capacity) == int(12 * math.log(2 * 1000 / (12 * 5)))
    _released(capacity, 1, blocks=0, steps=0)
    assert _headroom(capacity) == int(6 * math.log(2 * 1000 / (6 * 2.5)))
    _released(capacity, 200, blocks=20, steps=5)
    assert _headroom(capacity) == int(20 * math.log(2 * 1000 / (20 * 5))) == 59


def test_costly_preemptions_make_for_more_headroom() -> None:
    """The headroom grows with the logarithm of the preemption cost; ten times the cost adds 2.3 times the growth."""
    headrooms = []
    for cost in (1.0, 10.0, 100.0):
        capacity = Capacity("max_utilization", 1000)
        for _ in range(200):
            capacity.preempted(cost)
        # Many releases cancel the effect of the preemptions above.
        _released(capacity, 500, blocks=20, steps=5)
        headrooms.append(_headroom(capacity))
    assert headrooms == [59, 105, 152]


def test_the_headroom_is_no_more_than_what_running_requests_can_still_take() -> None:
    """Four requests that have 2 blocks each and need at most 4 leave 8 blocks to take."""
    capacity = Capacity("max_utilization", 1000)
    _released(capacity, 20, blocks=20, steps=5)
    assert _headroom(capacity, limit=17) == 4 * (4 - 2)
    assert _headroom(capacity, limit=9) == 0


def test_there_is_no_headroom_where_memory_is_released_faster_than_it_is_taken() -> None:
    """Requests that end long before memory could run out need none, however few blocks there are."""
    capacity = Capacity("max_utilization", 50)
    _released(capacity, 20, blocks=0, steps=1)
    assert _headroom(capacity) == 0
    _released(capacity, 100, blocks=20, steps=20)
    assert _headroom(capacity) == 0


def test_a_preemption_adds_to_the_headroom_for_tens_of_steps() -> None:
    """However many there were, half of it is gone after 35 steps, and it is never more than half of the memory."""
    capacity = Capacity("max_utilization", 1000)
    for _ in range(10):
        capacity.preempted(1.0)
    assert _headroom(capacity) == 50
    for _ in range(35):
        capacity.step_planned()
    assert _headroom(capacity) == 24
    for _ in range(1000):
        capacity.preempted(1.0)
    assert _headroom(capacity) == 500


# ---------------------------------------------------------------- gates


def is_open(gate: BatchGate, *, num_running: int, num_waiting: int, now: float, num_assigned: int = 0) -> bool:
    """Whether the gate of a worker is open whose prefill steps take half a second."""
    return gate.is_open(
        num_running=num_running, num_waiting=num_waiting, now=now, prefill_s=0.5, num_assigned=num_assigned
    )


def test_a_delay_collects_for_the_time_of_prefill_steps() -> None:
    """While requests run, an admission waits until the last is a prefill step times the factor ago."""
    gate = BatchGate(BatchingLimits(delay_factor=2.0))
    assert is_open(gate, num_running=3, num_waiting=1, now=10.0), "nobody was admitted yet"
    gate.admitted(5, 10.0)
    assert not is_open(gate, num_running=3, num_waiting=1, now=10.9)
    assert is_open(gate, num_running=0, num_waiting=1, now=10.9), "nobody runs"
    assert is_open(gate, num_running=3, num_waiting=1, now=11.0)
    gate.admitted(5, 12.0)
    assert not is_open(gate, num_running=3, num_waiting=1, now=12.5)
    always = BatchGate(BatchingLimits())
    always.admitted(5, 10.0)
    assert is_open(always, num_running=3, num_waiting=1, now=10.0)


def test_a_batch_closes_when_it_is_full_and_opens_when_all_are_done() -> None:
    """A static batch of two: collected until two wait or the time is up, then shut until the worker is empty."""
    gate = BatchGate(BatchingLimits(mode="static", max_batch_size=2, max_wait_s=1.0))
    assert not is_open(gate, num_running=0, num_waiting=1, now=10.0)
    assert not is_open(gate, num_running=0, num_waiting=1, now=10.9)
    assert is_open(gate, num_running=0, num_waiting=1, now=11.0)
    gate.admitted(5, 11.0)
    assert is_open(gate, num_running=1, num_waiting=1, now=11.0)
    gate.admitted(5, 11.0)
    assert not is_open(gate, num_running=2, num_waiting=9, now=20.0)
    assert not is_open(gate, num_running=1, num_waiting=9, now=20.0)
    assert is_open(gate, num_running=0, num_waiting=2, now=20.0)
    gate.close()
    assert not is_open(gate, num_running=0, num_waiting=1, now=30.0), "collecting begins anew"
    assert is_open(gate, num_running=0, num_waiting=1, now=31.0)


def test_an_assigned_request_opens_the_gate_of_an_empty_worker() -> None:
    """A request of another worker's complete batch is not collected a second time; a running batch stays closed."""
    gate = BatchGate(BatchingLimits(mode="static", max_batch_size=2, max_wait_s=1.0))
    assert not is_open(gate, num_running=0, num_waiting=1, now=10.0)
    assert gate.may_open(num_running=0)
    assert is_open(gate, num_running=0, num_waiting=1, now=10.1, num_assigned=1)
    gate.admitted(5, 10.1)
    gate.close()
    assert not gate.may_open(num_running=1)
    assert not is_open(gate, num_running=1, num_waiting=1, now=10.2, num_assigned=1)


def test_a_dynamic_batch_has_a_token_limit_that_its_first_request_may_exceed() -> None:
    """The limit is reached, not exceeded, by those after the first; static batches have none."""
    gate = BatchGate(BatchingLimits(mode="dynamic", max_batch_size=9, max_wait_s=0.0, max_tokens_per_batch=10))
    assert is_open(gate, num_running=0, num_waiting=1, now=1.0)
    assert gate.admits(50, num_running=0, now=1.0)
    gate.admitted(4, 1.0)
    assert gate.admits(6, num_running=1, now=1.0)
    gate.admitted(6, 1.0)
    assert not gate.admits(1, num_running=2, now=1.0)
    assert not is_open(gate, num_running=2, num_waiting=1, now=1.0), "the batch is complete"
    assert is_open(gate, num_running=0, num_waiting=1, now=2.0)
    assert gate.admits(50, num_running=0, now=2.0), "the next batch counts from zero"
    static = BatchGate(BatchingLimits(mode="static", max_batch_size=9, max_wait_s=0.0, max_tokens_per_batch=10))
    assert is_open(static, num_running=0, num_waiting=1, now=1.0)
    static.admitted(9, 1.0)
    assert static.admits(50, num_running=1, now=1.0)
    unlimited = BatchGate(BatchingLimits(mode="dynamic", max_batch_size=9, max_wait_s=0.0))
    assert is_open(unlimited, num_running=0, num_waiting=1, now=1.0)
    unlimited.admitted(9, 1.0)
    assert unlimited.admits(50, num_running=1, now=1.0)


def test_a_batch_that_has_run_collects_the_next_one_from_the_request_that_does_not_fit() -> None:
    """An idle worker does not wait for another event before it begins to collect."""
    gate = BatchGate(BatchingLimits(mode="dynamic", max_batch_size=9, max_wait_s=1.0, max_tokens_per_batch=10))
    assert not is_open(gate, num_running=0, num_waiting=1, now=0.0)
    assert is_open(gate, num_running=0, num_waiting=1, now=1.0)
    gate.admitted(8, 1.0)
    assert is_open(gate, num_running=0, num_waiting=1, now=2.0), "the batch has seats left"
    assert not gate.admits(5, num_running=0, now=2.0)
    assert not is_open(gate, num_running=0, num_waiting=1, now=2.9)
    assert is_open(gate, num_running=0, num_waiting=1, now=3.0)


# ---------------------------------------------------------------- tenants


def test_a_bucket_holds_ten_seconds_and_may_go_below_zero() -> None:
    """Prompts count at the first start, outputs when delivered; nothing new starts below zero, and at zero it does."""
    tenants = Tenants({"": TenantLimits(tokens_per_s=2.0)})
    big = make_request(prompt=int(BURST_S * 2))
    assert tenants.may_run(big, 100.0)
    tenants.arrived(big, 100.0)
    tenants.started(big, 0.0, 100.0)
    big.attempts = 1
    assert tenants.may_run(make_request(), 100.0), "zero is not below zero"
    tenants.paused(big, 100.0)
    tenants.started(big, 0.0, 100.0)
    big.attempts = 2
    assert tenants.may_run(make_request(), 100.0), "a prompt counts once"
    tenants.charged("", 3, 100.0)
    assert not tenants.may_run(make_request(), 101.4)
    assert tenants.may_run(big, 100.0), "it has started"
    assert tenants.may_run(make_request(), 101.5)
    assert tenants.may_run(make_request(tenant="another"), 100.0)


def test_requests_that_have_started_reserve_what_they_will_generate() -> None:
    """Another request starts when the bucket holds the rest of their output, or when they end early."""
    tenants = Tenants({"": TenantLimits(tokens_per_s=10.0)})
    running = make_request(prompt=10)
    tenants.arrived(running, 0.0)
    tenants.started(running, 120.0, 0.0)
    running.attempts = 1
    assert not tenants.may_run(make_request(), 0.0)
    tenants.charged("", 100, 0.0)
    assert not tenants.may_run(make_request(), 2.9), "20 tokens are reserved, and 19 are in the bucket"
    assert tenants.may_run(make_request(), 3.0)
    running.tokens.extend([1] * 100)
    tenants.ended(running, 1.0, was_running=True)
    assert tenants.may_run(make_request(), 3.0)
    assert not tenants.may_run(make_request(), 0.9)


def test_waiting_and_running_are_counted_apart() -> None:
    """Each request counts in one place at a time, and in none after its end."""
    tenants = Tenants({"a": TenantLimits(max_running=1, max_queued=1)})
    first, second, other = make_request(tenant="a"), make_request(tenant="a"), make_request(tenant="b")
    assert tenants.may_queue(first)
    tenants.arrived(first, 0.0)
    assert not tenants.may_queue(second)
    assert tenants.may_queue(other)
    tenants.started(first, 0.0, 0.0)
    assert tenants.may_queue(second)
    assert not tenants.may_run(second, 0.0)
    assert tenants.may_run(other, 0.0)
    tenants.paused(first, 0.0)
    assert tenants.may_run(second, 0.0)
    assert not tenants.may_queue(second)
    tenants.started(first, 0.0, 0.0)
    tenants.arrived(second, 0.0)
    tenants.ended(first, 0.0, was_running=True)
    assert tenants.may_run(second, 0.0)
    assert not tenants.may_queue(make_request(tenant="a"))
    tenants.ended(second, 0.0, was_running=False)
    assert tenants.may_queue(make_request(tenant="a"))
