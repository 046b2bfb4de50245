"""Chunks of prompts beside decode rows: as large as the measured speed and the target allow."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.workers.chunks import (
    FIRST_CHUNKS,
    PACE_S,
    PREFILL_FACTOR,
    Pace,
    affordable_tokens,
    chunk_budget,
)
from scheduler_svc.core.workers.cost_model import CostModel, StepShape
from tests.scheduler_svc.cluster import Cluster

TARGET_S = 0.5
DECODE_S = 0.06
TOKEN_S = 0.0015
NOISE = 0.2


class _Device:
    """A worker whose steps take a fixed time and a time per token, give or take NOISE."""

    def __init__(self, decode_s: float = DECODE_S, token_s: float = TOKEN_S, target_s: float = TARGET_S) -> None:
        self.costs = CostModel()
        self.target_s, self.decode_s, self.token_s = target_s, decode_s, token_s
        self._rng = random.Random(1)

    def decode(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.measured(self._noisy(self.decode_s))

    def step(self, *, decodes: bool = True, waiting: int = 1 << 20) -> tuple[int, float]:
        """Compute what the budget permits of the `waiting` tokens; return how many, and the time without noise."""
        budget = self.budget(decodes=decodes)
        chunks = waiting if budget is None else min(budget, waiting)
        duration = self.decode_s + self.token_s * chunks
        self.measured(self._noisy(duration), chunks, decodes=decodes)
        return chunks, duration

    def budget(self, *, decodes: bool = True) -> int | None:
        return chunk_budget(self.costs, self.target_s, StepShape(int(decodes)))

    def measured(self, duration: float, chunks: int = 0, *, decodes: bool = True) -> None:
        self.costs.measured(StepShape(int(decodes), chunks, 100 * decodes), duration)

    def _noisy(self, duration: float) -> float:
        return duration * self._rng.uniform(1 - NOISE, 1 + NOISE)


SECONDS = st.floats(1e-6, 1e3)


@given(target_s=SECONDS, decode_s=st.one_of(st.just(0.0), SECONDS), token_s=SECONDS)
def test_the_largest_chunks_that_keep_to_the_target(target_s: float, decode_s: float, token_s: float) -> None:
    """The step takes at most the target, or twice a step without chunks; one more token would exceed both."""
    allowed_s = max(target_s, 2 * decode_s)

    tokens = affordable_tokens(target_s, decode_s, token_s)

    assert tokens == 1 or decode_s + tokens * token_s <= allowed_s * (1 + 1e-9)
    assert decode_s + (tokens + 1) * token_s > allowed_s * (1 - 1e-9)


@pytest.mark.parametrize("token_s", [0.0003, 0.0015, 0.008])
def test_steps_come_to_take_the_target(token_s: float) -> None:
    """After three steps of a prompt, every further one takes the target, on fast and on slow processors."""
    device = _Device(token_s=token_s)
    assert device.budget() == FIRST_CHUNKS
    device.decode()

    for _ in range(3):
        device.step()
    for _ in range(50):
        assert device.step()[1] == pytest.approx(TARGET_S, rel=2 * NOISE)


def test_chunks_follow_a_processor_that_slows_down_and_recovers() -> None:
    """A speed that changes by ten times is learned within six steps, in both directions."""
    device = _Device()
    device.decode()
    for token_s in (TOKEN_S, 10 * TOKEN_S, TOKEN_S):
        device.token_s = token_s
        for _ in range(6):
            device.step()
        assert device.step()[1] == pytest.approx(TARGET_S, rel=2 * NOISE)


def test_one_disturbed_step_does_not_make_chunks_small() -> None:
    """A step that stood still for a minute changes the next chunks by no more than a third."""
    device = _Device()
    device.decode()
    for _ in range(5):
        device.step()
    before = device.step()[0]

    device.measured(60.0, before)

    assert device.step()[0] > 0.6 * before


def test_a_slow_first_step_is_soon_forgotten() -> None:
    """After a first decode step that took a hundred times as long, ten others are enough."""
    device = _Device()
    device.measured(100 * DECODE_S)
    device.decode(10)
    for _ in range(5):
        device.step()

    assert device.step()[1] == pytest.approx(TARGET_S, rel=2 * NOISE)


def test_without_decode_rows_a_step_may_take_longer() -> None:
    """No reader waits for its next token."""
    device = _Device()
    device.step()
    for _ in range(20):
        device.step(decodes=False)

    assert device.step(decodes=False)[1] == pytest.approx(PREFILL_FACTOR * TARGET_S, rel=2 * NOISE)


def test_prompts_get_half_of_the_time_where_decoding_alone_exceeds_the_target() -> None:
    """A large model: a decode step takes two seconds, and a step with chunks about four."""
    device = _Device(decode_s=4 * TARGET_S, token_s=0.1)
    device.decode()
    for _ in range(5):
        device.step()

    assert device.step()[1] == pytest.approx(8 * TARGET_S, rel=2 * NOISE)


def test_short_prompts_say_nothing_about_long_chunks() -> None:
    """The time of a three-token prompt is noise: any number of such prompts leaves the budget nearly unchanged."""
    device = _Device()
    device.decode()
    for _ in range(5):
        device.step()
    before = device.budget()
    assert before is not None

    for _ in range(100):
        device.step(waiting=3)

    assert device.budget() == pytest.approx(before, rel=0.1)


def test_without_a_target_there_is_no_limit() -> None:
    """Neither before nor after a measurement."""
    device = _Device(target_s=0.0)
    assert device.budget() is None
    device.step(waiting=1000)
    assert device.budget() is None


# ---------------------------------------------------------------- the pace for readers


def _fast_costs() -> CostModel:
    """Return the costs of a device that computes 40,000 tokens per second, with 6 ms for each step."""
    costs = CostModel()
    for number in range(400):
        shape = StepShape(1 + number % 8, 500 * (number % 3), 1000)
        costs.measured(shape, 0.006 + 25e-6 * shape.prompt_tokens)
    return costs


def _step_s(costs: CostModel, tokens: int | None) -> float:
    assert tokens is not None
    return costs.fixed_s + tokens * costs.prompt_token_s


def test_a_step_keeps_the_pace_or_is_as_long_as_pays() -> None:
    """With few prompts the readers keep their pace, with many they do not, and there is no intermediate step."""
    costs, pace = _fast_costs(), Pace()
    shape = StepShape(4, 0, 1000)
    durations = [
        _step_s(costs, pace.chunk_budget(costs, TARGET_S, shape, number, 2000 * number)) for number in range(400)
    ]

    assert durations[0] == pytest.approx(PACE_S, rel=0.05)
    assert durations[-1] > 3 * PACE_S
    assert len({round(duration, 4) for duration in durations}) == 2


def test_the_pace_returns_when_most_prompts_are_computed() -> None:
    """The number of prompts that ends the pace exceeds the number at which it returns."""
    costs, pace = _fast_costs(), Pace()
    shape = StepShape(4, 0, 1000)

    def keeps(number: int) -> bool:
        return _step_s(costs, pace.chunk_budget(costs, TARGET_S, shape, number, 2000 * number)) < 1.1 * PACE_S

    ended = next(number for number in range(1000) if not keeps(number))
    returned = next(number for number in reversed(range(ended)) if keeps(number))
    assert returned < 0.7 * ended


def test_more_readers_keep_the_pace_longer() -> None:
    """The pace is worth more delay of prompts, the more readers there are."""
    costs = _fast_costs()

    def ends_at(num_rows: int) -> int:
        pace, shape = Pace(), StepShape(num_rows, 0, 1000)
        return next(
            number
            for number in range(1000)
            if _step_s(costs, pace.chunk_budget(costs, TARGET_S, shape, number, 2000 * number)) > 1.1 * PACE_S
        )

    assert ends_at(8) > 1.3 * ends_at(2)


# ---------------------------------------------------------------- in the core

LONG = 2000


def _durations_beside_a_long_prompt(**limits: float) -> list[tuple[Plan, float]]:
    """Return the plans with a chunk of a long prompt that arrives while a request decodes, and their durations."""
    cluster = Cluster(max_num_seqs=4, max_plans_in_flight=1, **limits)
    cluster.join(ModelWorker(b"w/1", 600, 4, 4, max_tokens_per_step=1000))
    cluster.submit(1, [1, 2, 3], 100)
    found = []
    for number in range(100):
        if number == 10:
            cluster.submit(2, [token % 50 for token in range(LONG)], 1)
        cluster.plan()
        plan = cluster.plans[-1]
        duration = DECODE_S + TOKEN_S * plan.num_tokens
        cluster.now += duration
        cluster.answer()
        if plan.num_decodes and len(plan.chunk_rows):
            found.append((plan, duration))
    assert sum(int(plan.chunk_lengths.sum()) for plan, _ in found) == LONG
    return found


def test_a_long_prompt_does_not_hold_up_a_decode_row_beyond_the_target() -> None:
    """No step with a chunk exceeds the target; while few prompt tokens wait, steps are shorter."""
    durations = [
        duration for _, duration in _durations_beside_a_long_prompt(max_num_batched_tokens=1000, itl_target_s=TARGET_S)
    ]

    assert min(durations[:-1]) > DECODE_S
    assert max(durations) <= 1.05 * TARGET_S


def test_the_token_budget_is_obeyed_whatever_the_target() -> None:
    """`max_num_batched_tokens` limits every step, even if the target would allow more."""
    plans = _durations_beside_a_long_prompt(max_num_batched_tokens=30, itl_target_s=1000.0)

    assert max(plan.num_tokens for plan, _ in plans) == 30


def test_without_a_target_a_prompt_takes_the_whole_budget() -> None:
    """Chunks as large as the worker allows."""
    plans = _durations_beside_a_long_prompt(max_num_batched_tokens=1 << 20)

    assert [plan.num_tokens for plan, _ in plans[:-1]] == [1000, 1000]
