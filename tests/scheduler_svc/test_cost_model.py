"""The cost model: step times learned from steps with any mix, and the decisions that depend on them."""

import random
from collections.abc import Callable

import pytest

from scheduler_svc.core.workers.chunks import chunk_budget
from scheduler_svc.core.workers.copy_cost import CopyCost
from scheduler_svc.core.workers.cost_model import MIN_DEADLINE_S, CostModel, StepShape

H100 = (6e-3, 10e-6, 25e-6, 43.7e-9)
"""Fixed time, and times per row, prompt token and token of context: an 8B model on an H100."""
CPU = (5e-3, 0.5e-3, 0.5e-3, 1e-7)
COMPUTE_BOUND = (0.0, 1e-3, 1e-3, 0.0)
DEVICES = [H100, CPU, COMPUTE_BOUND]


def seconds(device: tuple[float, ...], shape: StepShape) -> float:
    """Time of a step on a device."""
    fixed, row, prompt, context = device
    return fixed + row * shape.rows + prompt * shape.prompt_tokens + context * shape.context


def mixed(rng: random.Random, number: int) -> list[StepShape]:
    """Steps of a busy worker: rows come and go, and every fourth step has a chunk."""
    rows, shapes = 10, []
    for _ in range(number):
        rows = max(1, min(256, rows + rng.randint(-5, 5)))
        chunk = rng.randint(1, 2000) if not rng.randrange(4) else 0
        shapes.append(StepShape(rows, chunk, rows * rng.randint(900, 1100)))
    return shapes


def learned(
    device: tuple[float, ...], shapes: list[StepShape], disturbed: Callable[[float], float] = float
) -> CostModel:
    """A model that has measured these steps."""
    costs = CostModel()
    for shape in shapes:
        costs.measured(shape, disturbed(seconds(device, shape)))
    return costs


def error(costs: CostModel, device: tuple[float, ...], shapes: list[StepShape]) -> float:
    """Mean relative error of the expected times."""
    return sum(abs(costs.expected_s(each) / seconds(device, each) - 1) for each in shapes) / len(shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.002), (0.02, 0.01), (0.2, 0.04)])
def test_any_device_is_learned(device: tuple[float, ...], noise: float, most: float) -> None:
    """After some hundred steps, expected times are right within a fraction of the noise, in spite of interruptions."""
    rng = random.Random(3)
    costs = learned(
        device,
        mixed(rng, 600),
        lambda s: s * rng.uniform(1 - noise, 1 + noise) * (5 if noise and rng.random() < 0.01 else 1),
    )

    assert error(costs, device, mixed(rng, 300)) < most
    assert min(costs.fixed_s, costs.row_s, costs.prompt_token_s, costs.context_token_s) >= 0


def test_short_prompts_do_not_make_prompt_tokens_look_slow() -> None:
    """A step's fixed time is not charged to its eight prompt tokens (8 ms + 40 us per token)."""
    device = (8e-3, 40e-6, 40e-6, 0.0)
    costs = learned(device, [StepShape(0, 8), *[StepShape(1, 0, 10)] * 4] * 30)

    assert costs.prompt_token_s == pytest.approx(40e-6, rel=0.5)
    assert costs.expected_s(StepShape(1, 4000, 10)) == pytest.approx(0.168, rel=0.5)


def test_a_column_that_never_varies_keeps_what_is_known_of_it() -> None:
    """Prompt tokens cost after hours of steady decoding what they cost before."""
    rng = random.Random(1)
    costs = learned(CPU, mixed(rng, 400))
    before = costs.prompt_token_s
    for _ in range(20_000):
        costs.measured(StepShape(8, 0, 8000), seconds(CPU, StepShape(8, 0, 8000)))

    assert costs.prompt_token_s == pytest.approx(before, rel=0.05)
    assert error(costs, CPU, [StepShape(8, 0, 8000), StepShape(8, 500, 8000)]) < 0.02


def test_what_was_never_measured_is_uncertain() -> None:
    """Steps with fifteen rows say little about steps with eight; a few of those are enough."""
    costs = learned(COMPUTE_BOUND, [StepShape(15, 0, 15000)] * 100)
    assert costs.uncertainty(StepShape(15, 0, 15000)) < 0.03
    assert costs.uncertainty(StepShape(8, 0, 8000)) > 0.1

    for _ in range(8):
        costs.measured(StepShape(8, 0, 8000), 0.008)

    assert costs.uncertainty(StepShape(8, 0, 8000)) < 0.05
    assert error(costs, COMPUTE_BOUND, [StepShape(rows, 0, 1000 * rows) for rows in (8, 12, 15)]) < 0.02


@pytest.mark.parametrize("factor", [0.1, 0.3, 4.0, 10.0])
def test_a_change_of_speed_is_learned_within_a_few_steps(factor: float) -> None:
    """Throttling and its end are followed, and not taken for disturbances."""
    costs = learned(H100, mixed(random.Random(1), 400))
    changed = (H100[0] * factor, *H100[1:])
    shape = StepShape(10, 0, 10_000)
    for _ in range(6):
        costs.measured(shape, seconds(changed, shape))

    assert error(costs, changed, [shape]) < 0.2


def test_one_disturbed_step_changes_little() -> None:
    """A step of a minute changes the expected time by less than a tenth."""
    shape = StepShape(10, 0, 10_000)
    costs = learned(H100, [shape] * 50)
    before = costs.expected_s(shape)
    costs.measured(shape, 60.0)

    assert costs.expected_s(shape) == pytest.approx(before, rel=0.1)


def test_a_slow_first_step_is_soon_forgotten() -> None:
    """The first step may compile kernels and take a hundred times as long."""
    shape = StepShape(4, 0, 4000)
    costs = CostModel()
    costs.measured(shape, 100 * seconds(H100, shape))
    for _ in range(10):
        costs.measured(shape, seconds(H100, shape))

    assert error(costs, H100, [shape]) < 0.1


def test_the_longest_time_of_a_step_follows_its_expected_time() -> None:
    """It is the ceiling until enough was seen, then eight times what such steps take, and more after a long one."""
    shape = StepShape(8, 0, 8000)
    device = (1.0, 0.0, 0.0, 0.0)
    costs = learned(device, [shape] * 19)
    assert costs.bounds(shape, 60.0)[2] == 60.0
    costs.measured(shape, 1.0)
    usual = costs.bounds(shape, 60.0)[2]
    assert 8.0 <= usual < 12.0
    assert costs.bounds(StepShape(8, 4000, 8000), 60.0)[2] == 60.0, "no step with a chunk was measured"
    costs.measured(shape, 2.0)
    assert costs.bounds(shape, 60.0)[2] > 16.0
    for _ in range(200):
        costs.measured(shape, 0.01)
    assert costs.bounds(shape, 60.0)[2] == MIN_DEADLINE_S


def test_nearly_all_steps_take_the_least_time() -> None:
    """It is 0 for steps of which too little is known."""
    rng = random.Random(2)
    shape = StepShape(8, 0, 8000)
    assert CostModel().bounds(shape, 60.0)[0] == 0.0
    costs = learned(H100, [shape] * 200, lambda s: s * rng.uniform(0.97, 1.03))
    least, _, _ = costs.bounds(shape, 60.0)
    assert 0.8 < least / seconds(H100, shape) < 0.97
    assert costs.bounds(StepShape(8, 50_000, 8000), 60.0)[0] == 0.0


def test_a_lost_step_is_counted_in_what_an_empty_row_wastes() -> None:
    """An empty row wastes its part of a step's fixed time, not of the time that grows with the rows."""
    assert CostModel().recompute_steps(1000, 4) == 1.0
    costs = learned((8e-3, 1e-3, 1e-3, 0.0), mixed(random.Random(1), 400))
    assert costs.recompute_steps(200, 4) == pytest.approx(200 * 1e-3 / 8e-3, rel=0.1)


# ---------------------------------------------------------------- copies


def _copied(*samples: float) -> CopyCost:
    costs = CopyCost()
    for each in samples:
        costs.measured(10, each)
    return costs


def test_copies_pay_when_both_ways_take_less_than_computing() -> None:
    """Before they are known, they are tried."""
    assert CopyCost().pays(10, 1e-9)
    costs = _copied(0.1, 0.1, 0.1)
    assert costs.pays(10, 0.21)
    assert not costs.pays(10, 0.19)


def test_a_slow_copy_does_not_end_swapping() -> None:
    """The first copies happen to be slow. Whenever copies look expensive, they are measured again, ever more rarely."""
    assert _copied(2.0).pays(10, 0.5), "one copy says little"
    costs = _copied(2.0, 2.0, 2.0)
    tried_at = []
    for number in range(1000):
        if costs.pays(10, 0.5):
            tried_at.append(number)
            costs.measured(10, 2.0)
    assert len(tried_at) < 10, "copies that stay dear are hardly made"
    for _ in range(1000):
        if costs.pays(10, 0.5):
            costs.measured(10, 0.02)
    assert costs.pays(10, 0.5), "swapping is back"


def test_one_disturbed_step_among_the_first_does_not_keep_chunks_long() -> None:
    """The only short chunk was disturbed, so the fixed time looks long; chunks are short again after a few steps."""
    token_s = 2.3e-3
    costs = CostModel()
    first = ((128, 0.425), (128, 0.258), (14, 0.236), (17, 0.048), (159, 0.520), (105, 0.277), (76, 0.115))
    for tokens, duration in first:
        costs.measured(StepShape(0, tokens), duration)
    for context in range(600, 610, 2):
        chunk = chunk_budget(costs, 10 * token_s, StepShape(2, 0, context))
        assert chunk is not None
        assert chunk < 25
        costs.measured(StepShape(2, chunk, context), token_s * (3 + chunk))
