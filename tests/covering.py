"""Covering arrays: few cases in which every value of a feature occurs with every value of each other feature."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

Case = dict[str, str]
"""A value of each feature."""


def covering(features: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """Yield cases that together have every pair of values, chosen greedily."""
    names = list(features)
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*features.values())]
    missing = set().union(*map(_pairs, cases))
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(best)
        yield best


def _pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(case.items(), 2))
