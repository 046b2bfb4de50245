"""The figures of a benchmark are exact, and count from the intended start."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.load.figures import Figures, Interval, Sample, Slo, is_saturated
from measure.load.outcomes import Ending, Outcome
from measure.spread import Spread


def _outcome(
    *times: float, due: float = 0.0, sent: float = 0.0, tokens: int | None = None, ending: Ending = Ending.DONE
) -> Outcome:
    end = times[-1] if times else due
    count = len(times) if tokens is None else tokens
    return Outcome(0, due, sent, end, ending, "HTTP 500" * (ending is Ending.FAILED), array("d", times), 10, 4, count)


def test_latency_counts_from_the_intended_start() -> None:
    """A request that was due at 1 and sent at 3 has waited 2 s more than its server saw."""
    outcome = _outcome(4.0, 4.5, 6.0, due=1.0, sent=3.0)

    assert outcome.ttft_s == 3.0
    assert outcome.e2e_s == 5.0
    assert outcome.late_s == 2.0
    assert list(outcome.gaps_s) == [0.5, 1.5]
    assert outcome.tpot_s == 1.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_exact(values: list[float]) -> None:
    """They are numpy's, over all values."""
    spread = Spread.of(values)

    assert spread.count == len(values)
    assert spread.p50 == np.percentile(values, 50)
    assert spread.p999 == np.percentile(values, 99.9)
    assert spread.max == max(values)
    assert set(spread.to_json()) == {"count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"}


def test_a_run_without_tokens_has_figures() -> None:
    """No request and only failed requests: every figure is zero."""
    assert Figures.of([], Slo()).output_rate == 0.0
    failed = Figures.of([_outcome(ending=Ending.FAILED)], Slo())
    assert (failed.failures, failed.goodput, failed.good_share, failed.ttft.count) == ({"HTTP 500": 1}, 0.0, 0.0, 0)


def test_figures_count_requests_tokens_and_failures() -> None:
    """Rates cover the time from the first intended start to the last end; failed requests have no latency."""
    figures = Figures.of(
        [
            _outcome(2.0, 3.0, due=1.0),
            _outcome(2.0, 5.0, due=1.0, tokens=8),
            _outcome(2.0, due=2.0, ending=Ending.CANCELLED),
            _outcome(due=2.0, ending=Ending.FAILED),
        ],
        Slo.parse(["e2e_ms=3000"]),
    )

    assert (figures.requests, figures.done, figures.cancelled, figures.failed) == (4, 2, 1, 1)
    assert figures.wall_s == 4.0
    assert figures.output_rate == 11 / 4
    assert figures.request_rate == 2 / 4
    assert figures.goodput == 1 / 4
    assert figures.good_share == 1 / 3
    assert figures.ttft.count == 2


def test_requests_of_the_warm_up_do_not_count() -> None:
    """Figures exclude warm-up requests from counts and times."""
    warm_up = Outcome(0, 0.0, 0.0, 9.0, counted=False, output_tokens=99)

    assert Figures.of([warm_up, _outcome(2.0, due=1.0)], Slo()) == Figures.of([_outcome(2.0, due=1.0)], Slo())


@pytest.mark.parametrize(
    ("limit", "kept"),
    [("ttft_ms=1000", True), ("ttft_ms=999", False), ("itl_ms=99", False), ("itl_ms=101", True), ("tpot_ms=61", True),
     ("tpot_ms=10", False), ("e2e_ms=1299", False), ("e2e_ms=1301", True)],
)  # fmt: skip
def test_a_limit_is_kept_or_not(limit: str, kept: bool) -> None:
    """First token after 1 s, then gaps of 0.1, 0.1 and 0.1 s with six tokens."""
    assert Slo.parse([limit]).is_kept(_outcome(1.0, 1.1, 1.2, 1.3, tokens=6)) is kept


def test_one_gap_in_a_hundred_may_exceed_the_limit() -> None:
    """The ITL limit holds for 99 % of a request's gaps."""
    even = [0.01 * number for number in range(300)]

    assert Slo.parse(["itl_ms=20"]).is_kept(_outcome(*even, even[-1] + 5))
    assert not Slo.parse(["itl_ms=20"]).is_kept(_outcome(*(5.0 * (n // 20) + 0.01 * n for n in range(300))))


@pytest.mark.parametrize("text", ["ttft=5", "ttft_ms", "ttft_ms=-1", "itl_ms=x", "itl_ms=nan"])
def test_an_invalid_limit_is_refused(text: str) -> None:
    """The message repeats it and says what to write."""
    with pytest.raises(ValueError, match=r"; (use|give) "):
        Slo.parse([text])


def test_intervals_are_those_of_student() -> None:
    """Five repeats: mean ± 2.776 standard errors. One repeat tells nothing about the spread."""
    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])

    assert interval.mean == 3.0
    assert interval.half_width == pytest.approx(2.776 * np.std([1, 2, 3, 4, 5], ddof=1) / np.sqrt(5))
    assert Interval.of([4.0]) == Interval(4.0, 0.0)


def test_intervals_contain_the_mean_in_95_of_100_cases() -> None:
    """Over 2,000 experiments of four repeats each."""
    rng = np.random.default_rng(1)
    hits = [abs(each.mean - 7.0) <= each.half_width for each in map(Interval.of, rng.normal(7.0, 2.0, (2000, 4)))]

    assert np.mean(hits) == pytest.approx(0.95, abs=0.02)


def _samples(answered_per_s: float, seconds: int = 40, first: int = 0) -> list[Sample]:
    return [Sample(t, 10 * t, max(first, round(answered_per_s * t))) for t in range(seconds)]


def test_an_over_saturated_server_is_found() -> None:
    """Ten arrivals per second: six answered are too few, ten are not, and a short run is no evidence."""
    assert is_saturated(_samples(6))
    assert not is_saturated(_samples(10))
    assert not is_saturated(_samples(9.7))
    assert not is_saturated(_samples(6, seconds=15))
    assert not is_saturated([])


def test_a_backlog_that_does_not_grow_is_no_saturation() -> None:
    """A queue of 100 from a burst long ago, or one that becomes shorter, stops no run."""
    assert not is_saturated([Sample(t, 100 + 10 * t, 10 * t) for t in range(60)])
    assert not is_saturated([Sample(t, 300 + 10 * t, min(300 + 10 * t, 15 * t)) for t in range(60)])
