"""Step times: known coefficients are found again, and the model is read as it was written."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from records.whatif.rows import Shape
from records.whatif.step_times import (
    Sample,
    StepTimesError,
    from_json,
    learn,
    non_negative_least_squares,
    to_json,
)

LINK_S = 0.0004


def _known(shape: Shape) -> float:
    return 0.002 + 50e-6 * shape.decodes + 20e-6 * shape.prefill + 4e-9 * shape.context + 1e-9 * shape.prefill_context


def _samples(
    seconds: Callable[[Shape], float], scatter: float = 0.0, number: int = 2000, drafts: int = 0
) -> list[Sample]:
    """Return one worker's steps; a third of them were planned while the worker was idle.

    With `drafts`, half of the steps verify up to so many for each decode row.
    """
    rng = random.Random(5)
    now, found = 10.0, []
    for _ in range(number):
        decodes = rng.randrange(1, 64)
        prefill = rng.choice((0, 0, rng.randrange(1, 512)))
        shape = Shape(decodes, prefill, decodes * rng.randrange(20, 2000), prefill * rng.randrange(1, 2000))
        if drafts and rng.random() < 0.5:
            shape = shape._replace(drafts=rng.randrange(decodes * drafts))
        previous = now
        idle = rng.random() < 0.3
        planned = now + rng.uniform(0.001, 0.1) if idle else now - 0.001
        link = LINK_S if idle else 0.0
        now = max(previous, planned) + link + seconds(shape) * (1 + scatter * rng.uniform(-1, 1))
        found.append(Sample(shape, planned=planned, previous=previous, answered=now))
    return found


def test_known_coefficients_are_found() -> None:
    """Without scatter, the model predicts each step and the link as they were made."""
    times = learn(_samples(_known))

    assert times.link_s == pytest.approx(LINK_S, rel=0.01)
    assert times.constant_s == pytest.approx(0.002, rel=0.01)
    assert times.decode_s == pytest.approx(50e-6, rel=0.01)
    assert times.prefill_s == pytest.approx(20e-6, rel=0.01)
    assert times.context_s == pytest.approx(4e-9, rel=0.01)
    assert times.prefill_context_s == pytest.approx(1e-9, rel=0.01)
    assert times.fit is not None
    assert times.fit.p90_error < 0.01


def test_the_time_of_drafts_is_found() -> None:
    """A step with drafts takes a constant more, and a time for each draft."""

    def seconds(shape: Shape) -> float:
        return _known(shape) + (300e-6 + 40e-6 * shape.drafts if shape.drafts else 0.0)

    times = learn(_samples(seconds, drafts=8))

    assert times.drafting_s == pytest.approx(300e-6, rel=0.02)
    assert times.draft_s == pytest.approx(40e-6, rel=0.02)
    assert times.decode_s == pytest.approx(50e-6, rel=0.02)
    assert times.extrapolates(Shape(30, 0, 30_000, 0, drafts=700))
    assert set(times.spreads) == {"decode", "drafts", "prefill"}
    assert from_json(to_json(times)) == times


def test_scatter_does_not_shift_the_mean() -> None:
    """With steps that scatter by half, the sum of all steps is right, and the scatter is part of the model."""
    times = learn(_samples(_known, scatter=0.5))

    shape = Shape(30, 0, 30_000, 0)
    assert times.seconds(shape) == pytest.approx(_known(shape), rel=0.05)
    assert times.fit is not None
    assert abs(times.fit.total_error) < 0.01
    shares = [times.scattered(shape, (number + 0.5) / 1000) / times.seconds(shape) for number in range(1000)]
    assert np.mean(shares) == pytest.approx(1.0, abs=0.01)
    assert shares[0] == pytest.approx(0.5, abs=0.1)
    assert shares[-1] == pytest.approx(1.5, abs=0.1)


def test_steps_with_prompts_scatter_for_themselves() -> None:
    """One in ten of the few steps with prompts is interrupted; pure decode steps hardly scatter, as before."""
    number = 0

    def interrupted(shape: Shape) -> float:
        nonlocal number
        number += bool(shape.prefill)
        return _known(shape) * (4 if shape.prefill and number % 10 == 0 else 1)

    samples = [each for each in _samples(interrupted) if not each.shape.prefill or each.shape.decodes % 4 == 0]
    times = learn(samples, begin=10.0)

    decode, prompt = Shape(30, 0, 30_000, 0), Shape(30, 256, 30_000, 40_000)
    assert times.scattered(decode, 0.99) < 1.1 * times.scattered(decode, 0.5)
    assert times.scattered(prompt, 0.95) > 2.5 * times.scattered(prompt, 0.5)
    assert max(times.pace) < 1.2  # A single interruption must not make its whole half second count as slow.


def test_a_jump_between_sizes_is_learned() -> None:
    """Steps of more than 31 rows take twice as long, and the model predicts both durations."""
    times = learn(_samples(lambda shape: _known(shape) * (2 if shape.decodes > 31 else 1)))

    for shape in (Shape(24, 0, 20_000, 0), Shape(48, 0, 40_000, 0)):
        assert times.seconds(shape) == pytest.approx(_known(shape) * (2 if shape.decodes > 31 else 1), rel=0.15)


def test_a_disturbance_is_met_at_its_time() -> None:
    """While another process makes steps take twice as long, so does the model; the scatter excludes this."""
    samples, shift, found = _samples(_known), 0.0, []
    for each in samples:
        busy = each.answered - max(each.previous, each.planned)
        slow = busy if 20.0 < each.planned < 25.0 else 0.0
        found.append(
            each._replace(
                planned=each.planned + shift, previous=each.previous + shift, answered=each.answered + shift + slow
            )
        )
        shift += slow

    times = learn(found, begin=10.0)

    shape = Shape(30, 0, 30_000, 0)
    during, before = times.pace_at(12.0), times.pace_at(5.0)
    assert 1.5 < during / before < 2.2
    assert times.scattered(shape, 0.95) < 1.5 * times.scattered(shape, 0.05)
    without = learn(found)
    assert without.scattered(shape, 0.95) > 1.5 * without.scattered(shape, 0.05)
    assert times.pace_at(1e9) == 1.0


def test_no_coefficient_is_negative() -> None:
    """A feature that would need a negative coefficient gets none, and the others describe the target best."""
    rng = np.random.default_rng(1)
    design = rng.uniform(0, 1, (200, 3))
    target = design @ np.array([2.0, -1.0, 0.5])

    found = non_negative_least_squares(design, target)

    assert found[1] == 0
    # No other permitted value is closer to the target.
    without = np.linalg.lstsq(design[:, [0, 2]], target, rcond=None)[0]
    assert found[[0, 2]] == pytest.approx(without)


def test_a_model_is_read_as_it_was_written() -> None:
    """The JSON holds the whole model; another text is refused with the remedy."""
    times = learn(_samples(_known, scatter=0.2))

    assert from_json(to_json(times)) == times
    for text in ("", "{}", "[1]", '{"version": 7}', to_json(times).replace("spreads", "spread")):
        with pytest.raises(StepTimesError, match="--learn-step-times"):
            from_json(text)


def test_too_few_steps_are_refused() -> None:
    """Without enough steps there is no model, and the message says how many there are."""
    with pytest.raises(StepTimesError, match="3 answered steps"):
        learn(_samples(_known)[:3])


def test_copies_that_overlap_do_not_lengthen_steps() -> None:
    """The time of copies that ran concurrently with steps is known, although steps with copies are not longer."""
    samples = [
        each._replace(shape=each.shape._replace(copied_blocks=number % 4), copy_s=1e-4 * (number % 4))
        for number, each in enumerate(_samples(_known))
    ]
    times = learn(samples)

    assert times.block_overlap_s == pytest.approx(1e-4)
    assert times.block_copy_s < 1e-6
    assert from_json(to_json(times)) == times


def test_measured_copies_are_not_fitted() -> None:
    """The worker's measurement of rare and short copies is used, although other steps scatter by more than a copy."""
    samples = [
        each._replace(
            shape=each.shape._replace(copied_blocks=number % 50 == 0),
            answered=each.answered + (1e-5 if number % 50 == 0 else 0.0),
            copy_s=1e-5 if number % 50 == 0 else 0.0,
            copy_delay_s=1e-5 if number % 50 == 0 else 0.0,
        )
        for number, each in enumerate(_samples(_known, scatter=0.5))
    ]
    times = learn(samples)

    assert times.block_copy_s == pytest.approx(1e-5)
    assert times.block_overlap_s == 0.0
