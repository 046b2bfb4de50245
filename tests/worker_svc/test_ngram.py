"""The n-gram proposer against a search of all earlier tokens."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from worker_svc.speculation import ngram
from worker_svc.speculation.ngram import NgramIndex, continuation


def longest_match(tokens: list[int]) -> int:
    """The longest match of the last tokens with earlier ones, up to the limit; 0 below the least."""
    end = len(tokens)
    for length in range(min(ngram._LONGEST, end - 1), ngram._SHORTEST - 1, -1):
        suffix = tokens[end - length :]
        if any(tokens[first : first + length] == suffix for first in range(end - length)):
            return length
    return 0


@settings(max_examples=examples(200), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    first=st.integers(1, 60),
    cap=st.sampled_from([ngram._CANDIDATES, 1000]),
)
def test_the_longest_match_is_found_however_the_index_grew(tokens: list[int], first: int, cap: int) -> None:
    """With enough places to look at, the match is the longest; with few it is a match. The tokens after it follow."""
    known, index = array("i", tokens[:first]), NgramIndex()
    assert index.extend(known)
    for token in tokens[first:]:
        known.append(token)
        assert index.extend(known)

    place, length = index.search(known, cap)

    assert length == longest_match(tokens) if cap == 1000 else length <= longest_match(tokens)
    if length:
        assert tokens[place - length + 1 : place + 1] == tokens[-length:]
        assert place < len(tokens) - 1
        proposed = continuation(known, place, 7)
        extended = tokens + proposed
        assert all(extended[place + 1 + i] == token for i, token in enumerate(proposed))


def test_a_short_period_is_continued_as_far_as_wanted() -> None:
    """A match that runs into the end of the text repeats itself."""
    known, index = array("i", [9, 1, 2, 1, 2, 1, 2]), NgramIndex()
    index.extend(known)
    place, length = index.search(known)

    assert length == 4
    assert continuation(known, place, 6) == [1, 2, 1, 2, 1, 2]


def test_only_recent_tokens_are_searched_and_an_index_grows_in_parts() -> None:
    """A match further back than the window is not found. A long text is indexed in several calls."""
    window = ngram._WINDOW
    old = [1_000_001, 1_000_002, 1_000_003]
    near = array("i", [*old, *range(window - 10), *old])
    far = array("i", [*old, *range(window + 10), *old])
    found = []
    for known in (near, far):
        index, calls = NgramIndex(), 1
        while not index.extend(known):
            calls += 1
        assert calls >= window // ngram._MOST_INDEXED
        found.append(index.search(known))

    assert found == [(2, 3), (0, 0)]
