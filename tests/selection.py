"""The tests that `make test` runs: all except those marked `release`, and part of those marked `drawn` or `every`.

`@pytest.mark.drawn(3)` marks a parametrised test with slow cases; three of its cases run each day.
`@pytest.mark.every(3)` marks a slow test whose code changes seldom; it runs every third day, with about the same number
of such tests on each day. The seed in `tests/examples.py` determines which cases and tests run. `make test-all` runs
all of them.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

LEFT_OUT = "left_out"
"""Output entry of a pytest-xdist process: node ids of the tests that a run omits."""


def function_of(node_id: str) -> str:
    """Return a test's node id without its case's parameters."""
    return node_id.partition("[")[0]


def daily(items: Sequence[pytest.Item], seed: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of a daily run and the omitted ones, both in the given order."""
    candidates = [item for item in items if item.get_closest_marker("release") is None]
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in candidates:
        if item.get_closest_marker("drawn") is not None:
            cases[function_of(item.nodeid)].append(item)
    not_drawn: set[pytest.Item] = set()
    for function, of_function in cases.items():
        marker = of_function[0].get_closest_marker("drawn")
        assert marker is not None
        drawn = random.Random(f"{seed} {function}").sample(of_function, min(marker.args[0], len(of_function)))
        not_drawn.update(set(of_function) - set(drawn))
    for days, of_period in _periods(candidates).items():
        for place, (_, of_function) in enumerate(sorted(of_period.items())):
            if (place + seed) % days:
                not_drawn.update(of_function)
    chosen = [item for item in candidates if item not in not_drawn]
    return chosen, [item for item in items if item not in set(chosen)]


def _periods(items: Iterable[pytest.Item]) -> dict[int, dict[str, list[pytest.Item]]]:
    """Return the tests marked `every`, by their days and their function."""
    periods: defaultdict[int, defaultdict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        marker = item.get_closest_marker("every")
        if marker is not None:
            periods[marker.args[0]][function_of(item.nodeid)].append(item)
    return {days: dict(of_period) for days, of_period in periods.items()}


def table_of(left_out: Iterable[str]) -> list[str]:
    """Return a line for each test function that was left out, with its number of cases.

    Args:
        left_out: node ids.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    for node_id in left_out:
        counts[function_of(node_id)] += 1
    return [f"{count:>6} x  {function}" for function, count in sorted(counts.items())]
