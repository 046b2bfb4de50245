"""Incremental detokenising gives the text of a full decode, whole characters at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.text.detokenizer import REPLACEMENT, detokenizer_factory
from tests.services.tokenizers_for_tests import byte_level, metaspace, sentencepiece_style, word_piece

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=60)
EMOJI = st.text(st.sampled_from("🙂🙃😀👩\u200d👧🇩🇪aé日 "), max_size=30)
CUTS = st.lists(st.integers(1, 5), max_size=80)


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Return each push's text, with the ids split into pushes of the given sizes (then of one), and the end's text."""
    detokenizer = detokenizer_factory(tokenizer)(skip_special_tokens)
    texts, position, sizes = [], 0, iter(cuts)
    while position < len(ids):
        size = next(sizes, 1)
        texts.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*texts, detokenizer.finish()]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


@given(ids=st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=60), cuts=CUTS, skip=st.booleans())
def test_byte_level_equals_the_full_decode_for_any_ids(ids: list[int], cuts: list[int], skip: bool) -> None:
    """Whatever ids a byte-level model samples, valid or not, the joined pieces are the full decode."""
    tokenizer = byte_level()

    texts = pieces(tokenizer, ids, cuts, skip_special_tokens=skip)

    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [metaspace(), word_piece()], ids=["metaspace", "word-piece"])
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_vocabularies_without_byte_tokens_equal_the_full_decode_for_any_ids(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    """A token's text depends on its neighbours there; the joined pieces still equal the full decode."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))

    texts = pieces(tokenizer, ids, cuts, skip_special_tokens=skip)

    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_repeated_replacement_character_is_not_held_back() -> None:
    """If a model repeats the token U+FFFD, text is output, because no later token can complete so many bytes."""
    tokenizer = metaspace()
    replacement = id_of(tokenizer, REPLACEMENT)

    texts = pieces(tokenizer, [replacement] * 12, [])

    assert any(texts[:5])
    assert "".join(texts) == REPLACEMENT * 12


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_style()], ids=["byte-level", "sentencepiece"])
@given(text=TEXTS | EMOJI, cuts=CUTS)
def test_valid_text_comes_out_in_whole_characters(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    """The ids of a valid text give the full decode, and no piece ever holds half a character."""
    ids = tokenizer.encode(text).ids

    texts = pieces(tokenizer, ids, cuts)

    assert "".join(texts) == tokenizer.decode(ids)
    assert all(REPLACEMENT not in piece for piece in texts)


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_style()], ids=["byte-level", "sentencepiece"])
def test_tokens_that_end_a_character_are_released_at_once(tokenizer: Tokenizer) -> None:
    """Each push of ASCII returns its text at once."""
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False).ids

    texts = pieces(tokenizer, ids, [])

    assert all(texts[:-1])
    assert texts[-1] == ""


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_style()], ids=["byte-level", "sentencepiece"])
def test_an_invalid_byte_is_not_held_back_for_ever(tokenizer: Tokenizer) -> None:
    """Bytes that can become no character come out as U+FFFD after at most three more tokens."""
    lead = id_of(tokenizer, "æ" if tokenizer is byte_level() else "<0xE6>")

    texts = pieces(tokenizer, [lead] * 12, [])

    assert any(REPLACEMENT in piece for piece in texts[:5])
    assert "".join(texts) == tokenizer.decode([lead] * 12)


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    """What was held back when the stream ends is written as U+FFFD, once."""
    tokenizer = byte_level()
    lead = id_of(tokenizer, "æ")

    texts = pieces(tokenizer, [lead], [])

    assert texts == ["", REPLACEMENT]


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece_style()], ids=["byte-level", "sentencepiece"])
def test_special_tokens_are_left_out_only_when_asked(tokenizer: Tokenizer) -> None:
    """The end-of-sequence token is part of the text only if special tokens are included."""
    eos = id_of(tokenizer, "<eos>")

    assert "".join(pieces(tokenizer, [eos] * 3, [])) == ""
    assert "".join(pieces(tokenizer, [eos] * 3, [], skip_special_tokens=False)) == "<eos><eos><eos>"


def test_a_long_stream_of_special_tokens_changes_nothing() -> None:
    """A space after many skipped tokens in the middle of a text is not taken for the leading space of a text."""
    tokenizer = sentencepiece_style()
    eos = id_of(tokenizer, "<eos>")
    words = tokenizer.encode("the fox", add_special_tokens=False).ids

    text = "".join(pieces(tokenizer, [*words, *[eos] * 100, *words], []))

    assert text == tokenizer.decode([*words, *words])
