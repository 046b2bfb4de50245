"""How the prompt tokens of a step are shared among prompts under way and waiting requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.planning.prompt_chunks import short_part
from scheduler_svc.core.queueing.shortest_first import ShortestFirst
from tests.scheduler_svc.cluster import Cluster
from tests.scheduler_svc.operations import count_calls
from tests.scheduler_svc.requests import make_request

_EVERY_POLICY_BUT_FCFS = ["balanced", "priority", "sjf", "edf", "slo", "fair", "lpm"]


def _cluster(policy: str, *, budget: int = 16, rows: int = 8, blocks: int = 40960) -> Cluster:
    cluster = Cluster(
        policy=policy, max_num_seqs=rows, max_num_batched_tokens=budget, max_plans_in_flight=1, prefix_cache="off"
    )
    cluster.join(ModelWorker(b"w", blocks, 4, rows, max_tokens_per_step=budget))
    return cluster


def _next_plan(cluster: Cluster) -> Plan:
    cluster.plan()
    cluster.answer()
    return cluster.plans[-1]


def _chunks(plan: Plan) -> dict[int, int]:
    return dict(zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True))


@given(st.integers(1, 10_000), st.integers(0, 100), st.booleans())
def test_four_steps_divide_the_budget_exactly(budget: int, step: int, first_is_late: bool) -> None:
    """The short part is half of the budget, or three quarters if the first prompt is late, even for one token."""
    parts = [short_part(budget, step + each, first_is_late=first_is_late) for each in range(4)]
    assert sum(parts) == (3 if first_is_late else 2) * budget
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("policy", _EVERY_POLICY_BUT_FCFS)
def test_a_short_prompt_is_in_the_next_plan(policy: str) -> None:
    """A short prompt gets its first token with the next plan, whatever long prompts are under way or wait."""
    cluster = _cluster(policy)
    for stream in range(3):
        cluster.submit(stream, [stream] * 400, 5, tenant="z")
    _next_plan(cluster)
    short = cluster.submit(9, [9] * 6, 5, tenant="a")
    _next_plan(cluster)
    assert len(short.tokens) == 1


def test_under_fcfs_prompts_are_computed_in_order_of_arrival() -> None:
    """Under `fcfs` a short prompt waits for the long one before it."""
    cluster = _cluster("fcfs")
    long = cluster.submit(1, [1] * 160, 5)
    _next_plan(cluster)
    short = cluster.submit(2, [2] * 6, 5)
    while not short.tokens:
        _next_plan(cluster)
    assert long.tokens


def test_an_urgent_prompt_overtakes_the_prompts_under_way() -> None:
    """Under `priority` an urgent long prompt gets half of the tokens at least from the next plan on."""
    cluster = _cluster("priority")
    cluster.submit(1, [1] * 400, 5, priority=0)
    _next_plan(cluster)
    urgent = cluster.submit(2, [2] * 160, 5, priority=100)
    num_plans = len(cluster.plans)
    while not urgent.tokens:
        _next_plan(cluster)
    assert len(cluster.plans) - num_plans <= 2 * 160 / 16 + 1


def test_short_prompts_double_the_time_of_a_long_one_at_most() -> None:
    """However many short prompts arrive, the first prompt in the order gets half of every step's prompt tokens."""
    cluster = _cluster("balanced", rows=12)
    long = cluster.submit(1, [1] * 200, 5)
    stream = 2
    while not long.tokens:
        for _ in range(6):
            cluster.submit(stream, [stream] * 5, 1)
            stream += 1
        _next_plan(cluster)
        (admission,) = [each for plan in cluster.plans for each in plan.admissions if each.stream == 1]
        num_decodes = cluster.plans[-1].num_decodes
        assert _chunks(cluster.plans[-1])[admission.row] >= (16 - num_decodes) // 2 or long.tokens


def _short_tokens(policy: str, waited_s: float) -> int:
    """Return how many of a plan's 16 tokens go to shorter prompts when the first one has waited."""
    cluster = _cluster(policy)
    cluster.submit(1, [1] * 400, 5, priority=1)
    _next_plan(cluster)
    cluster.now += waited_s
    for stream in range(2, 5):
        cluster.submit(stream, [stream] * 40, 5)
    plan = _next_plan(cluster)
    rows = {each.row for each in plan.admissions}
    return sum(length for row, length in _chunks(plan).items() if row in rows)


@pytest.mark.parametrize("policy", ["balanced", "sjf", "slo"])
def test_a_prompt_that_has_missed_its_target_yields_three_quarters(policy: str) -> None:
    """Shorter prompts get half of the tokens while the first prompt can be in time, and three quarters afterwards."""
    target_s = 2.0 + 400 * 125e-6
    assert _short_tokens(policy, target_s - 0.5) == 8
    assert _short_tokens(policy, target_s + 0.5) == 12


def test_an_urgent_prompt_keeps_half_when_it_is_late() -> None:
    """Under `priority` the first prompt is urgent however long it has waited."""
    assert _short_tokens("priority", 60.0) == 8


def test_a_short_prompt_leaves_the_last_row_to_the_first_request() -> None:
    """The short part takes no row that the first request in policy order needs."""
    cluster = _cluster("balanced", rows=2)
    running = cluster.submit(0, [7] * 4, 50)
    _next_plan(cluster)
    first = cluster.submit(1, [1] * 40, 2)
    others = [cluster.submit(stream, [stream] * 4, 2) for stream in range(2, 8)]
    while not first.tokens:
        _next_plan(cluster)
    assert running.end is None
    assert not any(other.tokens for other in others)


def test_a_short_prompt_leaves_the_memory_to_the_first_request() -> None:
    """The short part takes no memory that the first request in the order needs."""
    cluster = _cluster("balanced", blocks=30)
    cluster.submit(0, [7] * 60, 2)
    _next_plan(cluster)
    first = cluster.submit(1, [1] * 48, 2)
    others = [cluster.submit(stream, [stream] * 16, 2) for stream in range(2, 8)]
    while not first.tokens:
        _next_plan(cluster)
    assert sum(bool(other.tokens) for other in others) <= 1


def test_a_short_prompt_leaves_the_first_request_its_memory_on_an_idle_worker() -> None:
    """A request that fits only alone is not overtaken when the worker is idle: what the short one may take counts."""
    cluster = Cluster(
        policy="balanced", max_num_seqs=8, max_num_batched_tokens=16, prefix_cache="off", capacity="guaranteed_no_evict"
    )
    first = cluster.submit(1, [1] * 52, 9)
    short = cluster.submit(2, [2] * 4, 8)
    cluster.join(ModelWorker(b"w", 15, 4, 8, max_tokens_per_step=16))
    while not first.tokens:
        _next_plan(cluster)
    assert not short.tokens


@pytest.mark.every(3)
def test_plans_cost_the_same_however_many_requests_wait() -> None:
    """The short part looks at a few of the waiting requests only."""

    def calls(num_waiting: int) -> int:
        cluster = _cluster("balanced", rows=64, budget=64)
        for stream in range(num_waiting):
            cluster.submit(stream, [stream] * (100 + stream % 50), 5)
        for _ in range(3):
            _next_plan(cluster)
        core, now = cluster.core, cluster.now
        return count_calls(lambda: core.plan(b"w", now))

    assert calls(1000) <= 1.2 * calls(30) + 20


def test_a_request_that_grew_while_it_waits_is_as_long_as_it_is_now() -> None:
    """A preempted request may still get tokens of steps in flight. It then waits behind shorter requests."""
    grown, other = make_request(1, prompt=2), make_request(2, prompt=3)
    by_length = ShortestFirst({grown: "queue", other: "queue"}, lambda request: 0.0)
    by_length.push(grown)
    by_length.push(other)
    grown.tokens.extend([7, 8])
    assert by_length.first(lambda request: True) is other
    assert by_length.first(lambda request: request is grown) is grown
