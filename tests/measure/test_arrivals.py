"""Arrival processes have the rate and the spread that they promise, and are repeatable."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.load.arrivals import Constant, Gamma, OpenLoop, Ramp, Replay

COUNT = 20_000
PROCESSES = [
    Gamma(5.0),
    Gamma(0.5, burstiness=4.0),
    Gamma.of_cv(100.0, 13.2),
    Constant(8.0),
    Ramp(1.0, 9.0, 60.0),
    Ramp(9.0, 1.0, 60.0),
    Ramp(3.0, 3.0, 10.0),
]


def _gaps(process: OpenLoop, count: int = COUNT, seed: int = 1) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.diff([0.0, *islice(process.times(seed), count)])


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_times_are_ordered_and_a_function_of_the_seed(process: OpenLoop) -> None:
    """Times never decrease; equal seeds give equal times, different seeds different ones."""
    times = list(islice(process.times(7), 500))

    assert all(0 <= a <= b for a, b in pairwise(times))
    assert times == list(islice(process.times(7), 500))
    assert isinstance(process, Constant) or times != list(islice(process.times(8), 500))


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.09, 3.0])
def test_gaps_have_the_mean_and_the_coefficient_of_variation(cv: float) -> None:
    """20,000 gaps have both within 5 %."""
    gaps = _gaps(Gamma.of_cv(4.0, cv))

    assert gaps.mean() == pytest.approx(1 / 4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_very_bursty_gaps_too() -> None:
    """A CV of 13.2, as in the Azure code trace, is reached within 15 % over a million gaps."""
    gaps = np.concatenate([_gaps(Gamma.of_cv(4.0, 13.2), 50_000, seed) for seed in range(8)])

    assert gaps.mean() == pytest.approx(1 / 4.0, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(13.2, rel=0.15)


def test_a_poisson_process_is_the_default() -> None:
    """As many gaps are longer than t as an exponential distribution has."""
    gaps = _gaps(Gamma(2.0))

    for t in (0.1, 0.5, 1.0, 2.0):
        assert (gaps > t).mean() == pytest.approx(np.exp(-2.0 * t), abs=0.01)


def test_constant_arrivals_do_not_drift() -> None:
    """The millionth arrival is exactly where it belongs."""
    assert next(islice(Constant(3.0).times(0), 999_999, None)) == 999_999 / 3.0


@settings(max_examples=50, deadline=None)
@given(first=st.floats(0.0, 50), last=st.floats(0.5, 50), over_s=st.floats(1, 100))
def test_a_ramp_has_the_rate_of_each_moment(first: float, last: float, over_s: float) -> None:
    """The number of arrivals until any time equals the integrated rate, within five standard deviations."""
    times = np.array(list(islice(Ramp(first, last, over_s).times(3), 5000)))
    for t in (over_s / 3, over_s, 2 * over_s):
        ramp = min(t, over_s)
        expected = first * ramp + (last - first) * ramp**2 / (2 * over_s) + last * (t - ramp)
        if t < times[-1]:
            assert abs((times <= t).sum() - expected) <= 5 * np.sqrt(expected) + 1


def test_a_trace_begins_at_zero_and_may_be_replayed_faster() -> None:
    """The gaps are those of the trace, divided by the speed."""
    assert list(Replay((100.0, 101.0, 105.0), speed=2.0).times(0)) == [0.0, 0.5, 2.5]
