"""Where in a text its tokens begin, as completions with log-probabilities say."""

from hypothesis import given
from hypothesis import strategies as st

from services.http.logprobs import begins

SPECIAL = b"<|bos|>"


@given(pieces=st.lists(st.text("ab é€\n", min_size=1)), data=st.data())
def test_a_token_stands_where_it_begins(pieces: list[str], data: st.DataObject) -> None:
    """Whatever special tokens, which are no part of the text, are among them."""
    tokens: list[bytes] = []
    for piece in pieces:
        tokens += [SPECIAL] * data.draw(st.integers(0, 2))
        tokens.append(piece.encode())
    text = "".join(pieces)
    offsets = list(begins(tokens, text))

    assert offsets == sorted(offsets)
    assert all(
        text.startswith(token.decode(), offset)
        for token, offset in zip(tokens, offsets, strict=True)
        if token != SPECIAL
    )


def test_a_text_may_lack_the_first_space_and_parts_of_characters() -> None:
    """A dropped space shifts nothing that follows; a character in two tokens is begun by the first of them."""
    assert list(begins([b" Once", b" upon"], "Once upon")) == [0, 4]
    assert list(begins([b"\xc3", b"\xa9", b"a"], "éa")) == [0, 1, 1]
