"""Reader: text that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator. Its operations on the reader are generators too: they yield when they need more text, and
continue when it has arrived. Every decision depends on the characters alone, never on where a piece ends. Text that may
still become a marker is held back until it is certain.
"""

from collections.abc import Callable, Generator

SPACE = " \t\r\n"

Step = Generator[None, None, None]
"""A parser, or an operation of a parser without a result."""


class Reader:
    """Text that has arrived and is not consumed."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        """Whether no more text will arrive."""
        self.trimmed = ""
        """Whitespace that `until` has dropped before its last marker."""

    def feed(self, text: str) -> None:
        """Append text."""
        self.text += text

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
        """Whitespace that is held back; it is not searched again."""
        while True:
            if trim_start:
                self.text = self.text.lstrip(SPACE)
                trim_start = not self.text
            place, marker = _find(self.text, markers, ended=self.ended)
            before, self.text = self.text[:place], self.text[place:]
            kept = before.rstrip(SPACE) if trim_end else before
            if kept:
                emit("".join(spaces) + kept)
                spaces.clear()
            spaces.append(before[len(kept) :])
            if marker:
                self.trimmed = "".join(spaces)
                self.text = self.text[len(marker) :]
                return marker
            if self.ended:
                emit("".join(spaces))
                return ""
            yield

    def starts_with(self, *beginnings: str) -> Generator[None, None, str]:
        """Return the beginning that the text starts with, longest first, and consume it; empty for none."""
        while True:
            if not self.ended and any(len(self.text) < len(each) and each.startswith(self.text) for each in beginnings):
                yield
                continue
            for each in sorted(beginnings, key=len, reverse=True):
                if self.text.startswith(each):
                    self.text = self.text[len(each) :]
                    return each
            return ""

    def peek(self) -> Generator[None, None, str]:
        """Return the next character; empty at the end of the output."""
        while not self.text and not self.ended:
            yield
        return self.text[:1]

    def take(self) -> str:
        """Consume and return the next character, which `peek` has returned."""
        character, self.text = self.text[0], self.text[1:]
        return character

    def skip_space(self) -> Generator[None, None, str]:
        """Consume whitespace and return it."""
        skipped = ""
        while True:
            rest = self.text.lstrip(SPACE)
            skipped += self.text[: len(self.text) - len(rest)]
            self.text = rest
            if rest or self.ended:
                return skipped
            yield

    def json_value(self, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        """Pass the JSON value at this place to `emit`; return whether it is complete.

        Brackets and strings are followed, nothing else is checked. A number, a literal or an error ends before the next
        comma, bracket or space.
        """
        first = yield from self.peek()
        if first not in ('"', "{", "["):
            return (yield from self._scalar(emit))
        depth, in_string, escaped = 0, False, False
        while True:
            for place, character in enumerate(self.text):
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                if not depth and not in_string:
                    emit(self.text[: place + 1])
                    self.text = self.text[place + 1 :]
                    return True
            emit(self.text)
            self.text = ""
            if self.ended:
                return False
            yield

    def _scalar(self, emit: Callable[[str], None]) -> Generator[None, None, bool]:
        found = False
        while True:
            character = yield from self.peek()
            if not character or character in ',}]{[:"' + SPACE:
                return found
            emit(self.take())
            found = True


def _find(text: str, markers: tuple[str, ...], *, ended: bool) -> tuple[int, str]:
    """Return the place of the first marker and the marker itself.

    Without a marker: the place from which the text may still become one, or the text's end.
    """
    firsts = {marker[0] for marker in markers}
    for place, character in enumerate(text):
        if character not in firsts:
            continue
        rest = len(text) - place
        if not ended and any(len(each) > rest and each.startswith(text[place:]) for each in markers):
            return place, ""
        found = [each for each in markers if text.startswith(each, place)]
        if found:
            return place, max(found, key=len)
    return len(text), ""
