"""Chunks of a prompt: as long as the budget allows when attention counts as well."""

from hypothesis import given
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.workers.chunks import chunk_cost, longest_chunk
from tests.scheduler_svc.cluster import Cluster

BUDGET = 128
BREAK_EVEN = 500
LONG = 2000


@given(budget=st.integers(1, 1 << 14), context=st.integers(0, 1 << 20), break_even=st.integers(0, 1 << 20))
def test_no_longer_chunk_fits(budget: int, context: int, break_even: int) -> None:
    """The longest chunk costs no more than the budget, one token more would."""
    chunk = longest_chunk(budget, context, break_even)

    assert chunk_cost(chunk, context, break_even) <= budget
    assert chunk_cost(chunk + 1, context, break_even) > budget


@given(chunk=st.integers(1, 1 << 14), context=st.integers(0, 1 << 20))
def test_attention_costs_as_much_as_the_products_at_break_even(chunk: int, context: int) -> None:
    """Without a context, or where attention does not grow, tokens count once; at break-even twice."""
    assert chunk_cost(chunk, 0, 77) == chunk_cost(chunk, context, 0) == chunk
    assert chunk_cost(chunk, 77, 77) == 2 * chunk


def test_the_steps_of_a_long_prompt_cost_the_same() -> None:
    """Every step of a long prompt except its last uses the budget to within a token, at any position."""
    plans = _plans_of_long_prompt(BREAK_EVEN)
    computed, costs = 0, []
    for plan in plans:
        (length,) = plan.chunk_lengths.tolist()
        costs.append(length * (1 + computed / BREAK_EVEN))
        computed += length

    assert computed == LONG
    assert all(BUDGET - 1 - LONG / BREAK_EVEN < cost <= BUDGET for cost in costs[:-1])
    assert plans[0].num_tokens == BUDGET
    assert plans[-2].num_tokens < BUDGET / 4


def test_nobody_is_admitted_with_what_rounding_leaves() -> None:
    """While a long prompt takes as much of every step as possible, the next request stays in the queue."""
    cluster = _cluster(BREAK_EVEN, policy="fcfs")
    cluster.submit(1, [token % 50 for token in range(LONG)], 1)
    cluster.submit(2, [1, 2, 3], 1)
    cluster.run()
    rows = [plan.chunk_rows.tolist() for plan in cluster.plans if len(plan.chunk_rows)]

    assert len(rows) > LONG / BUDGET
    assert all(len(chunks) == 1 for chunks in rows[:-1])
    assert [len(plan.admissions) for plan in cluster.plans if len(plan.admissions)] == [1, 1]


def test_a_model_whose_attention_does_not_grow_gets_equal_chunks() -> None:
    """Without a break-even the budget counts tokens and nothing else."""
    lengths = [plan.num_tokens for plan in _plans_of_long_prompt(0)]

    assert lengths == [BUDGET] * (LONG // BUDGET) + [LONG % BUDGET]


def test_a_prompt_that_cannot_be_paid_for_gets_on_all_the_same() -> None:
    """One token after more context than a whole step's budget pays for."""
    plans = _plans_of_long_prompt(1)

    assert [plan.num_tokens for plan in plans[-10:]] == [1] * 10
    assert sum(plan.num_tokens for plan in plans) == LONG


def _cluster(break_even: int, policy: str = "balanced") -> Cluster:
    cluster = Cluster(max_num_batched_tokens=BUDGET, policy=policy)
    cluster.join(
        ModelWorker(
            peer=b"w/1", num_blocks=600, block_size=4, max_rows=2, max_tokens_per_step=1000,
            break_even_context=break_even,
        ),
        "a",
    )  # fmt: skip
    return cluster


def _plans_of_long_prompt(break_even: int) -> list[Plan]:
    cluster = _cluster(break_even)
    cluster.submit(1, [token % 50 for token in range(LONG)], 1)
    cluster.run()
    return [plan for plan in cluster.plans if len(plan.chunk_rows)]
