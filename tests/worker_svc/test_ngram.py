"""The n-gram proposer against a search of all earlier tokens."""

from array import array

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from worker_svc.speculation import ngram
from worker_svc.speculation.ngram import NgramProposer, continuation, search


def longest_match(tokens: list[int]) -> int:
    """Return the longest match between the last tokens and earlier ones, up to the limit; 0 below the minimum."""
    end = len(tokens)
    for length in range(min(ngram._LONGEST, end - 1), ngram._SHORTEST - 1, -1):
        suffix = tokens[end - length :]
        if any(tokens[first : first + length] == suffix for first in range(end - length)):
            return length
    return 0


@settings(max_examples=examples(200), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cap=st.sampled_from([ngram._CANDIDATES, 1000]),
)
def test_the_longest_match_is_found(tokens: list[int], cap: int) -> None:
    """If enough places are examined, the match is the longest; otherwise it is a match. The tokens after it follow."""
    text = np.array(tokens, np.int32)
    place, length = search(text, cap)

    assert length == longest_match(tokens) if cap == 1000 else length <= longest_match(tokens)
    if length:
        assert tokens[place - length + 1 : place + 1] == tokens[-length:]
        assert place < len(tokens) - 1
        proposed = continuation(text, place, 7)
        extended = tokens + proposed
        assert len(proposed) == 7
        assert all(extended[place + 1 + i] == token for i, token in enumerate(proposed))


def test_among_equal_matches_the_latest_wins() -> None:
    """Of two places with the same tokens, the later one is continued."""
    place, length = search(np.array([1, 2, 7, 1, 2, 8, 1, 2], np.int32))

    assert (place, length) == (4, 2)


def test_a_short_period_is_continued_as_far_as_wanted() -> None:
    """A match that runs into the end of the text repeats itself."""
    text = np.array([9, 1, 2, 1, 2, 1, 2], np.int32)
    place, length = search(text)

    assert length == 4
    assert continuation(text, place, 6) == [1, 2, 1, 2, 1, 2]


class _Text:
    """The tokens of one row."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = array("i", tokens)

    def known_tokens(self, row: int) -> "array[int]":
        """All tokens."""
        return self._tokens


def test_only_recent_tokens_are_searched() -> None:
    """A match further back than the window is not found."""
    window = ngram._WINDOW
    old = [1_000_001, 1_000_002, 1_000_003]
    found = []
    for between in (window - 10, window + 10):
        proposer = NgramProposer(_Text([*old, *range(between), *old]))  # type: ignore[arg-type]
        found.append(proposer.propose(np.array([0]), np.array([8])))

    assert [list(map(list, each)) for each in found] == [[[0, 1, 2]], [[]]]
