"""Tool calls as JSON objects: {"name": …, "arguments": {…}}, with the keys in any order."""

import secrets
from collections.abc import Callable, Container, Generator

from services.parsers.events import CallArguments, CallBegun, CallEnded, Emit
from services.parsers.reader import Reader, Step
from shared.json_text import read_json_text

_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")


class Calls:
    """Numbers the tool calls in one output and emits their events."""

    def __init__(self, emit: Emit, new_id: Callable[[], str]) -> None:
        self._emit = emit
        self._new_id = new_id
        self.count = 0
        """Number of calls so far."""
        self._has_arguments = False
        """Whether the latest call has arguments so far."""

    def begin(self, name: str) -> None:
        """Begin the next call."""
        self._emit(CallBegun(self.count, self._new_id(), name))
        self.count += 1
        self._has_arguments = False

    def arguments(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        if text:
            self._emit(CallArguments(self.count - 1, text))
            self._has_arguments = True

    def end(self) -> None:
        """End the latest call, which is complete."""
        if not self._has_arguments:
            self.arguments("{}")
        self._emit(CallEnded(self.count - 1))


def random_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def read_object(reader: Reader, calls: Calls, functions: Container[str] | None = None) -> Generator[None, None, str]:
    """Read a call from a JSON object at this place.

    Args:
        reader: the output.
        calls: receives the call.
        functions: valid function names; an object with another name is not a call. None if every name is valid.

    Returns:
        the text that was read if it is not a call, so that the caller can emit it; empty after a call.
    """
    read: list[str] = []
    """Text up to the name, which is content if there is no name."""
    waiting: list[str] = []
    """Arguments that appeared before the name."""
    begun = complete = has_arguments = False

    def keep(text: str) -> None:
        if not begun:
            read.append(text)

    def wait(text: str) -> None:
        waiting.append(text)
        read.append(text)

    if (yield from reader.peek()) != "{":
        return ""
    keep(reader.take())
    while True:
        keep((yield from reader.skip_space()))
        character = yield from reader.peek()
        if character in ("}", ","):
            keep(reader.take())
            if character == ",":
                continue
            complete = True
            break
        if character != '"':
            break
        key = yield from _string(reader, keep)
        keep((yield from reader.skip_space()))
        if (yield from reader.peek()) != ":":
            break
        keep(reader.take())
        keep((yield from reader.skip_space()))
        if key in _NAMES and not begun:
            name = yield from _string(reader, keep)
            if name is None or (functions is not None and name not in functions):
                break
            calls.begin(name)
            begun = True
            calls.arguments("".join(waiting))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from reader.json_value(calls.arguments if begun else wait)):
                break
        elif not (yield from reader.json_value(keep)):
            break
    if begun and complete:
        calls.end()
    return "" if begun else "".join(read)


def read_objects(reader: Reader, calls: Calls, show: Callable[[str], None]) -> Step:
    """Read calls from a JSON array of objects at this position. `show` receives the objects that are not calls."""
    if (yield from reader.peek()) == "[":
        reader.take()
    while True:
        yield from reader.skip_space()
        character = yield from reader.peek()
        if character == "{":
            show((yield from read_object(reader, calls)))
        elif character == ",":
            reader.take()
        else:
            if character == "]":
                reader.take()
            return


def _string(reader: Reader, keep: Callable[[str], None]) -> Generator[None, None, str | None]:
    """Read a JSON string and return its value; None if there is none."""
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        keep(piece)

    if not (yield from reader.json_value(add)):
        return None
    text = "".join(pieces)
    try:
        return str(read_json_text(text, strict=False))
    except ValueError:
        return text[1:-1]
