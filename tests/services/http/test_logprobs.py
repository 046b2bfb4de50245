"""Where in a text its tokens begin, as completions with log-probabilities say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.v1 import generation_pb2 as v1
from services.http.answers import Answer
from services.http.logprobs import Logprobs
from services.text.detokenizer import detokenizer_factory, token_reader
from tests.services.tokenizers_for_tests import BOS, byte_level, sentencepiece_style

TEXTS = st.text("ab é€🙂\n", max_size=40)
CUTS = st.lists(st.integers(1, 4), max_size=40)


def offsets_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, echoed: str = "") -> list[int]:
    """Return a completion's offsets for these tokens, sent in messages of the given sizes (then of one)."""
    make = detokenizer_factory(tokenizer)
    logprobs = Logprobs(0, False, token_reader(tokenizer), lambda: make(True))
    answer = Answer(chat=False, id="", model="", n=1, prompts=1, logprobs=logprobs, echo=bool(echoed))
    if echoed:
        list(answer.events(0, v1.GenerateResponse(prompt=v1.Prompt(text=echoed))))
    stream, found, position, sizes = make(True), [], 0, iter(cuts)
    while position < len(ids):
        message = ids[position : position + next(sizes, 1)]
        position += len(message)
        scored = [v1.TokenLogprobs(token=v1.ScoredToken(token_id=each, rank=1)) for each in message]
        delta = v1.Delta(token_ids=message, text=stream.push(message), logprobs=scored)
        for chunk in answer.events(0, v1.GenerateResponse(delta=delta)):
            found += chunk["choices"][0]["logprobs"]["text_offset"]
    return found


@given(text=TEXTS, specials=st.lists(st.integers(0, 40)), cuts=CUTS, echoed=TEXTS)
def test_a_token_begins_behind_the_characters_completed_before_it(
    text: str, specials: list[int], cuts: list[int], echoed: str
) -> None:
    """A token's offset is the number of characters completed before it, however characters are spread over tokens.

    Special tokens, which are not part of the text, take no characters. An echoed prompt comes first.
    """
    ids = byte_level().encode(text, add_special_tokens=False).ids
    for place in specials:
        ids.insert(place, BOS)
    ends = [len(text[: index + 1].encode()) for index in range(len(text))]
    expected, at = [], 0
    for token_id in ids:
        expected.append(len(echoed) + sum(end <= at for end in ends))
        at += 0 if token_id == BOS else len(token_reader(byte_level())(token_id))

    assert offsets_of(byte_level(), ids, cuts, echoed=echoed) == expected


@pytest.mark.parametrize("cuts", [[], [99]], ids=["alone", "together"])
def test_tokens_of_one_character_begin_where_it_does(cuts: list[int]) -> None:
    """The second half of an é has the é's offset, whether or not both come together; later tokens follow."""
    first, second = (byte_level().token_to_id(half) for half in "Ã©")
    assert first is not None
    assert second is not None
    after = byte_level().encode("a", add_special_tokens=False).ids

    assert offsets_of(byte_level(), [first, second, *after], cuts) == [0, 0, 1]


@given(cuts=CUTS)
def test_a_text_may_lack_the_space_of_its_first_token(cuts: list[int]) -> None:
    """Some tokenizers drop the space; this does not shift later tokens."""
    text = "the quick brown fox é 🙂 the sea"
    ids = sentencepiece_style().encode(text, add_special_tokens=False).ids
    read = token_reader(sentencepiece_style())
    places = zip(map(read, ids), offsets_of(sentencepiece_style(), ids, cuts), strict=True)
    whole = [(token, offset) for token, offset in list(places)[1:] if token.isascii()]

    assert len(whole) > 5
    assert all(text.startswith(token.decode(), offset) for token, offset in whole)
