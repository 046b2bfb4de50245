"""Incremental detokenising: token ids to text, in whole characters, with the same result as a full decode.

There are two implementations. In a byte-level vocabulary, every token is a fixed sequence of bytes. A table and an
incremental UTF-8 decoder suffice and take about a microsecond per batch of tokens. In other vocabularies
(sentencepiece, byte fallback, WordPiece), a token's text depends on its neighbours. Each push therefore decodes a short
window of tokens again and returns the new part.

An incomplete character is held back. The delay is bounded: a byte that can no longer become part of a character is
output as U+FFFD immediately. `finish` outputs incomplete characters.
"""

import codecs
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_SENTENCEPIECE_SPACE = "\u2581"

_MAX_INCOMPLETE = 3
"""Maximum number of replacement characters for an incomplete UTF-8 character, which has at most 3 bytes."""
_WINDOW = 16
"""Number of tokens at which the decoding window is truncated; limits the cost of a push."""


class Detokenizer(ABC):
    """Detokenizer of one stream."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text that was held back. `push` must not be called afterwards."""


class DetokenizerFactory(Protocol):
    """Creates the detokenizer of a stream."""

    def __call__(self, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> Detokenizer:
        """Return a new detokenizer.

        Args:
            skip_special_tokens: whether to omit special tokens from the text.
            shown: texts of special tokens that are never omitted.
        """


def detokenizer_factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    """Return the factory of detokenizers for one vocabulary."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    special = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @cache
    def skipped(skip_special_tokens: bool, shown: tuple[str, ...]) -> frozenset[int]:
        return frozenset(i for i, text in special.items() if text not in shown) if skip_special_tokens else frozenset()

    if decoder is not None and decoder["type"] == "ByteLevel":

        @cache
        def vocabulary(skip_special_tokens: bool, shown: tuple[str, ...]) -> ByteVocabulary:
            return ByteVocabulary(tokenizer, skipped(skip_special_tokens, shown))

        return lambda skip_special_tokens, shown=(): ByteLevelDetokenizer(vocabulary(skip_special_tokens, shown))
    byte_tokens = _byte_tokens(tokenizer) if "ByteFallback" in json.dumps(decoder) else {}
    return lambda skip_special_tokens, shown=(): WindowDetokenizer(
        tokenizer, byte_tokens, skipped(skip_special_tokens, shown)
    )


def token_reader(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return a function that maps a token id to the token's bytes, empty for an unknown id."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is not None and decoder["type"] == "ByteLevel":
        return ByteVocabulary(tokenizer, frozenset()).to_bytes
    byte_tokens = _byte_tokens(tokenizer) if "ByteFallback" in json.dumps(decoder) else {}

    def read(token_id: int) -> bytes:
        if token_id in byte_tokens:
            return bytes((byte_tokens[token_id],))
        return str(tokenizer.id_to_token(token_id) or "").replace(_SENTENCEPIECE_SPACE, " ").encode()

    return read


class ByteVocabulary:
    """The bytes of each token in a byte-level vocabulary, cached on first use."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        """Create the vocabulary; `skipped` are the tokens without text."""
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._bytes: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        """Text of tokens that are whole characters, by id."""

    def to_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for a token that is skipped or does not exist."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        value = self._bytes[token_id] = b"" if token is None else _token_to_bytes(token)
        with contextlib.suppress(UnicodeDecodeError):
            self.texts[token_id] = value.decode()
        return value


class ByteLevelDetokenizer(Detokenizer):
    """Detokenizer for byte-level vocabularies: exact and cheap, since tokens do not depend on their neighbours."""

    __slots__ = ("_incomplete", "_vocabulary")

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._incomplete = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        if len(token_ids) == 1 and not self._incomplete:
            text = self._vocabulary.texts.get(token_ids[0])
            if text is not None:
                return text
        received = self._incomplete + b"".join(map(self._vocabulary.to_bytes, token_ids))
        text, consumed = codecs.utf_8_decode(received, "replace", False)
        self._incomplete = received[consumed:]
        return text

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._incomplete.decode("utf-8", "replace")


class WindowDetokenizer(Detokenizer):
    """Detokenizer that decodes a window of recent tokens with every push and returns the new text.

    `_window` holds tokens; `_taken` is the number of characters already returned from its text. The window is truncated
    only where all text was returned, and never to zero tokens, because a decoder may strip the leading space of its
    first token.

    Byte fallback tokens ("<0xE2>") enter the window as whole characters. As long as one character in a run is
    incomplete, such decoders turn all bytes of the run into U+FFFD.
    """

    __slots__ = ("_byte_tokens", "_clean", "_decode", "_pending", "_skipped", "_taken", "_window")

    def __init__(self, tokenizer: Tokenizer, byte_tokens: Mapping[int, int], skipped: frozenset[int]) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
        self._byte_tokens = byte_tokens
        self._skipped = skipped
        self._pending: list[int] = []
        """Byte tokens of an incomplete character."""
        self._window: list[int] = []
        self._taken = 0
        self._clean = 0
        """Length of the window after the last push that held back nothing."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        before = len(self._window)
        for token_id in token_ids:
            if token_id in self._byte_tokens:
                self._pending.append(token_id)
                if self._pending_is_decided():
                    self._release_pending()
            elif token_id not in self._skipped:
                self._release_pending()
                self._window.append(token_id)
        return self._advance() if len(self._window) > before else ""

    def finish(self) -> str:
        """Return the text that was held back."""
        self._release_pending()
        return self._decode(self._window)[self._taken :]

    def _pending_is_decided(self) -> bool:
        """Return whether the pending bytes are a character or can never become one."""
        try:
            return codecs.utf_8_decode(bytes(self._byte_tokens[i] for i in self._pending), "strict", False)[1] > 0
        except UnicodeDecodeError:
            return True

    def _release_pending(self) -> None:
        self._window += self._pending
        self._pending.clear()

    def _advance(self) -> str:
        text = self._decode(self._window)
        certain = _certain_length(text)
        new = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        if certain == len(text):
            if len(self._window) > _WINDOW and self._clean > 0:
                del self._window[: self._clean]
                self._taken = len(self._decode(self._window))
            self._clean = len(self._window)
        return new


def _certain_length(text: str) -> int:
    """Return the length of the decoded text that later tokens cannot change.

    That is all but a last, possibly incomplete character. A longer run of replacement characters comes from invalid
    bytes.
    """
    end = len(text.rstrip(REPLACEMENT))
    return end if len(text) - end <= _MAX_INCOMPLETE else len(text)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the bytes of byte fallback tokens, by token id."""
    tokens = ((byte, tokenizer.token_to_id(f"<0x{byte:02X}>")) for byte in range(0x100))
    return {token_id: byte for byte, token_id in tokens if token_id is not None}


def _token_to_bytes(token: str) -> bytes:
    """Return a token's bytes as the byte-level decoder sees them.

    Added tokens may contain characters outside its alphabet.
    """
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable latin-1 bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
