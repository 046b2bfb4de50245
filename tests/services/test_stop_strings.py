"""Stop strings are found wherever they lie, and never let out in part."""

from hypothesis import given
from hypothesis import strategies as st

from services.text.stop_strings import StopFinder

ALPHABET = "abc"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the match that ends first (of several ending together, the longest), and the match."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(pieces=st.lists(st.text(ALPHABET, max_size=6), max_size=12), stops=STOPS)
def test_equals_a_naive_search_on_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """Whatever the pieces, text and match are those of a search over the whole text."""
    finder = StopFinder(stops)

    out = "".join([finder.push(piece) for piece in pieces] + [finder.finish()])

    expected, stop = naive("".join(pieces), stops)
    assert out == expected
    assert (finder.match.stop_string if finder.match else None) == stop
    if finder.match:
        assert finder.match.start == len(expected)


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_lets_out_all_that_cannot_be_part_of_a_match(text: str, stops: list[str]) -> None:
    """Exactly the longest suffix that may still become a stop string is held back, nothing more."""
    finder = StopFinder(stops)
    before, stop = naive(text, stops)

    out = finder.push(text)

    if stop is None:
        suffixes = [text[i:] for i in range(len(text) + 1)]
        held = next(s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops))
        assert out == text[: len(text) - len(held)]
    else:
        assert out == before


def test_text_after_a_match_is_swallowed() -> None:
    """Once a stop string was found nothing more comes out."""
    finder = StopFinder(["stop"])

    texts = [finder.push("go st"), finder.push("op and on"), finder.push("!"), finder.finish()]

    assert texts == ["go ", "", "", ""]


def test_a_stop_string_may_hold_any_characters() -> None:
    """Characters outside the basic plane match like all others."""
    finder = StopFinder(["🙂🙃"])

    assert finder.push("a🙂") + finder.push("🙃b") == "a"
