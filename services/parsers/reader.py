"""Reader for text that arrives in pieces, so that parsers can be written as if the text were complete.

A parser is a generator. Its operations on the reader are generators too: they yield when they need more text, and
continue when more text has arrived. Decisions depend only on the characters, never on the boundaries between pieces.
Text that may still become a marker is held back until this is certain.

Regardless of piece sizes, each character is copied a bounded number of times. An operation only advances the position
in the text, and the consumed part is dropped when the next piece arrives.
"""

import re
from collections.abc import Callable, Generator
from functools import cache

SPACE = " \t\r\n"
_SPACES = re.compile(f"[{SPACE}]*")
_SCALAR = re.compile(rf'[^,}}\]{{\[:"{SPACE}]*')
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')

Step = Generator[None, None, None]
"""A parser, or an operation of a parser without a result."""


class Reader:
    """Text that has arrived and was not consumed yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Number of consumed characters in the text."""
        self.ended = False
        """Whether no more text will arrive."""
        self.trimmed = ""
        """Whitespace that `until` has dropped before its last marker."""

    @property
    def rest(self) -> str:
        """The text that is not consumed."""
        return self._text[self._at :]

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self.rest + text
        self._at = 0

    def until(
        self, emit: Callable[[str], None], *markers: str, trim_start: bool = False, trim_end: bool = False
    ) -> Generator[None, None, str]:
        """Pass text to `emit` up to the first marker, and consume the marker.

        Args:
            emit: receives the text in pieces that are certain.
            markers: the markers to look for.
            trim_start: drop whitespace at the beginning.
            trim_end: drop whitespace right before the marker.

        Returns:
            the marker; empty at the end of the output.
        """
        spaces: list[str] = []
        """Whitespace that is held back and need not be searched again."""
        while True:
            if trim_start:
                self._take_space()
                trim_start = self._is_empty()
            place, marker = _find(self._text, self._at, markers, ended=self.ended)
            before, self._at = self._text[self._at : place], place
            kept = before.rstrip(SPACE) if trim_end else before
            if kept:
                emit("".join(spaces) + kept)
                spaces.clear()
            spaces.append(before[len(kept) :])
            if marker:
                self.trimmed = "".join(spaces)
                self._at += len(marker)
                return marker
            if self.ended:
                emit("".join(spaces))
                return ""
            yield

    def starts_with(self, *beginnings: str) -> Generator[None, None, str]:
        """Consume and return the longest of the given prefixes with which the text starts; empty for none."""
        longest_first = sorted(beginnings, key=len, reverse=True)
        while True:
            next_text = self._text[self._at : self._at + len(longest_first[0])]
            if not self.ended and any(len(next_text) < len(each) and each.startswith(next_text) for each in beginnings):
                yield
                continue
            for each in longest_first:
                if next_text.startswith(each):
                    self._at += len(each)
                    return each
            return ""

    def peek(self) -> Generator[None, None, str]:
        """Return the next character; empty at the end of the output."""
        while self._is_empty() and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """Consume and return the next character, which `peek` has returned."""
        character = self._text[self._at]
        self._at += 1
        return character

    def skip_space(self) -> Generator[None, None, str]:
        """Consume whitespace and return it."""
        skipped: list[str] = []
        while True:
            skipped.append(self._take_space())
            if self.ended or not self._is_empty():
                return "".join(skipped)
            yield

    def json_value(self, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        """Pass the JSON value at this position to `emit`; return whether the value is complete.

        Only brackets and strings are tracked; the syntax is not validated. A number, a literal or an error ends before
        the next comma, bracket or space.
        """
        first = yield from self.peek()
        if first not in ('"', "{", "["):
            return (yield from self._scalar(emit))
        depth, in_string, escaped = 0, False, False
        while True:
            text, start, place = self._text, self._at, self._at
            while place < len(text):
                if escaped:
                    escaped = False
                    place += 1
                    continue
                found = (_QUOTE_OR_ESCAPE if in_string else _BRACKET_OR_QUOTE).search(text, place)
                if found is None:
                    break
                place = found.end()
                match found[0]:
                    case '"':
                        in_string = not in_string
                    case "\\":
                        escaped = True
                    case "{" | "[":
                        depth += 1
                    case _:
                        depth -= 1
                if not depth and not in_string:
                    emit(text[start:place])
                    self._at = place
                    return True
            emit(text[start:])
            self._at = len(text)
            if self.ended:
                return False
            yield

    def _scalar(self, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        is_found = False
        while True:
            yield from self.peek()
            text = self._take(_SCALAR)
            if text:
                emit(text)
                is_found = True
            if self.ended or not self._is_empty():
                return is_found

    def _is_empty(self) -> bool:
        return self._at == len(self._text)

    def _take_space(self) -> str:
        return self._take(_SPACES)

    def _take(self, pattern: re.Pattern[str]) -> str:
        """Consume and return what a pattern matches here."""
        found = pattern.match(self._text, self._at)
        assert found is not None, "the pattern matches the empty text"
        self._at = found.end()
        return found[0]


def _find(text: str, start: int, markers: tuple[str, ...], *, ended: bool) -> tuple[int, str]:
    """Return the position of the first marker from `start` on, and the marker itself.

    Without a marker, return the position from which the text may still become a marker, or the end of the text.
    """
    if not markers:
        return len(text), ""
    for found in _first_characters(markers).finditer(text, start):
        place = found.start()
        rest = len(text) - place
        if not ended and any(len(each) > rest and text.endswith(each[:rest]) for each in markers):
            return place, ""
        complete = [each for each in markers if text.startswith(each, place)]
        if complete:
            return place, max(complete, key=len)
    return len(text), ""


@cache
def _first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of the characters with which a marker begins."""
    return re.compile("[" + "".join(re.escape(marker[0]) for marker in markers) + "]")
