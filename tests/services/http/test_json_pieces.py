"""JSON in pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from services.http.json_pieces import json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_the_pieces_are_the_json_text(value: object) -> None:
    """Joined, they are what the json module writes."""
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    assert "".join(json_pieces(value)) == expected


def test_each_piece_of_a_large_value_is_short() -> None:
    """Long lists are split, whether they contain scalars or objects."""
    vectors = [[0.5] * 10_000, [{"token": "x", "top": {"a": -1.0}}] * 10_000]

    pieces = list(json_pieces({"data": vectors}))

    assert json.loads("".join(pieces)) == {"data": vectors}
    assert max(map(len, pieces)) < 2000
