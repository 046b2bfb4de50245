"""The search finds the highest load within the limits; beyond the knee, latency grows faster."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.load.search import Search, judge, knee, pareto_front, share_interval


def _search(capacity: float, **options: float) -> tuple[Search, list[float]]:
    search = Search(**({"first": 1.0, "last": 256.0} | options))  # type: ignore[arg-type]
    tried = []
    while (load := search.next()) is not None:
        tried.append(load)
        assert len(tried) < 50
        search.note(load, is_kept=load <= capacity)
    return search, tried


@given(st.floats(0.1, 250))
def test_the_capacity_is_found_within_the_tolerance(capacity: float) -> None:
    """The accepted load is at most a tenth below a load that exceeds the limits, and the capacity lies between them."""
    search, tried = _search(capacity)

    assert search.kept is not None
    assert search.kept <= capacity
    assert search.broken is not None
    assert capacity < search.broken <= 1.1 * search.kept
    assert len(tried) == len(set(tried)) <= 14


@given(st.integers(1, 200))
def test_whole_loads_are_searched_to_the_neighbour(users: int) -> None:
    """With whole numbers and no tolerance to speak of, the next number breaks the limits."""
    search, tried = _search(users, tolerance=1e-9, is_whole=True)

    assert (search.kept, search.broken) == (users, users + 1)
    assert all(load == int(load) for load in tried)


def test_the_search_ends_at_its_bounds() -> None:
    """A server that keeps everything is tried up to the last load; one that keeps nothing down to a sixteenth."""
    assert _search(1e9)[0].kept == 256.0
    kept_nothing, tried = _search(0.0)
    assert kept_nothing.kept is None
    assert min(tried) == 1 / 16


@pytest.mark.parametrize(
    ("good", "asked", "kept", "sure"),
    [(1000, 1000, True, True), (20, 20, True, False), (940, 1000, False, False), (800, 1000, False, True),
     (0, 0, False, False), (99, 100, True, False), (990, 1000, True, True)],
)  # fmt: skip
def test_a_verdict_is_sure_when_the_interval_excludes_the_share(good: int, asked: int, kept: bool, sure: bool) -> None:
    """For a share of 95 %: few requests, or a share close to it, leave the verdict open."""
    verdict = judge(good, asked, 0.95)

    assert (verdict.is_kept, verdict.is_sure) == (kept, sure)


def test_intervals_of_shares_contain_the_share_in_95_of_100_cases() -> None:
    """Over 4,000 experiments of 60 requests with a share of 0.9."""
    good = np.random.default_rng(2).binomial(60, 0.9, 4000)
    hits = [low <= 0.9 <= high for low, high in (share_interval(int(each), 60) for each in good)]

    assert np.mean(hits) == pytest.approx(0.95, abs=0.03)


def test_the_knee_of_a_queue_is_found() -> None:
    """A queue's latency is 1 / (1 - load); the knee of the curve up to 95 % load lies between 65 % and 85 %."""
    loads = [number / 100 for number in range(5, 96, 5)]
    index = knee([(load, 1 / (1 - load)) for load in loads])

    assert index is not None
    assert 0.65 <= loads[index] <= 0.85


def test_a_knee_needs_three_points() -> None:
    """Two points have none; when throughput falls, the knee is its maximum."""
    assert knee([(1, 1), (2, 2)]) is None
    assert knee([(1, 1), (5, 2), (0.5, 9)]) == 1


def test_the_pareto_front_has_what_nothing_beats() -> None:
    """A point that another one equals or exceeds in both figures is left out."""
    points = [(1.0, 9.0), (2.0, 7.0), (2.0, 8.0), (3.0, 8.0), (4.0, 1.0), (4.0, 1.0)]

    assert pareto_front(points) == [0, 3, 4]
    assert pareto_front([(-x, y) for x, y in points], less_x_is_better=True) == [4, 3, 0]
    assert pareto_front([]) == []
