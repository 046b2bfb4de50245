"""Tool calls: the grammar that forces them, and the parsers that find them in the output.

With `tool_choice` "required" or a named function, a grammar forces a call: the answer is a JSON array of {"name",
"parameters"}, each following its function's schema. With "auto" the model decides, and writes calls in the form it was
trained on. The chat template reveals the form:

  * `hermes` (Qwen, Hermes and others): <tool_call>{"name": …, "arguments": …}</tool_call>, among ordinary text;
  * `llama3_json`: the whole answer is {"name": …, "parameters": …}, several with semicolons between them.

The parsers are state machines over text in pieces of any size. They return what is certain at once, so that arguments
stream, and hold back what may still become a call.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.http.schema import FunctionDefinition, JsonObject

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Ordinary text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call, with the name of its function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the latest call, as JSON text."""

    index: int
    text: str


Piece = Content | CallBegun | CallArguments


class AnswerParser(Protocol):
    """Parser of an answer that arrives in pieces."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after `text` has arrived."""

    def finish(self) -> list[Piece]:
        """Return the pieces that were held back, at the end of the text."""


def style_of(chat_template: str) -> str:
    """Return the form of calls that this template shows; empty for none or an unknown one."""
    if "tools" not in chat_template:
        return ""
    if _OPEN in chat_template:
        return "hermes"
    return "llama3_json" if '"parameters"' in chat_template and '"name"' in chat_template else ""


def parser_of(style: str) -> AnswerParser:
    """Return a parser for answers in which the model decides whether to call a tool."""
    return HermesCalls() if style == "hermes" else JsonCalls()


def forced_calls(functions: Sequence[FunctionDefinition], *, parallel: bool) -> JsonObject:
    """Return the JSON schema of an answer that calls at least one function; exactly one if not `parallel`."""
    definitions: JsonObject = {}
    items = [_call_schema(function, number, definitions) for number, function in enumerate(functions)]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": [*items]}}
    # Option of the grammar library: at most one space, because weak models may generate whitespace without end.
    schema["x-guidance"] = {"whitespace_pattern": " ?"}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _call_schema(function: FunctionDefinition, number: int, definitions: JsonObject) -> JsonObject:
    parameters = dict(function.parameters or {"type": "object"})
    for keyword in ("$defs", "definitions"):
        own = parameters.pop(keyword, None)
        if isinstance(own, dict):
            # References are relative to the root of the schema, and this schema is no longer the root.
            definitions.update({f"{number}.{name}": _moved(each, number) for name, each in own.items()})
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": _moved(parameters, number)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: object, number: int) -> JsonObject:
    """Return the schema with its references adjusted to the new place of the definitions."""
    moved = _move(schema, number)
    return moved if isinstance(moved, dict) else {}


def _move(node: object, number: int) -> object:
    if isinstance(node, list):
        return [_move(each, number) for each in node]
    if not isinstance(node, dict):
        return node
    return {key: _reference(each, number) if key == "$ref" else _move(each, number) for key, each in node.items()}


def _reference(target: object, number: int) -> object:
    for prefix in ("#/$defs/", "#/definitions/"):
        if isinstance(target, str) and target.startswith(prefix):
            return f"#/$defs/{number}.{target[len(prefix) :]}"
    return target


class ForcedCalls:
    """Parser of the array that a grammar forced."""

    def __init__(self) -> None:
        self._calls = 0
        self._object: _CallObject | None = None

    def push(self, text: str) -> list[Piece]:
        """Return the calls and their arguments; text between them is ignored."""
        pieces: list[Piece] = []
        while text:
            if self._object is None:
                start = text.find("{")
                if start < 0:
                    break
                self._object = _CallObject(self._calls)
                self._calls += 1
                text = text[start:]
            text = self._object.push(text, pieces)
            if self._object.complete:
                self._object = None
        return pieces

    def finish(self) -> list[Piece]:
        """Return nothing; this parser holds nothing back."""
        return []


class HermesCalls:
    """Parser of text with calls between tags."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0
        self._object: _CallObject | None = None
        self._inside = False
        """Whether the position is between the tags."""

    def push(self, text: str) -> list[Piece]:
        """Return the content up to a possible call, and the calls."""
        pieces: list[Piece] = []
        self._held += text
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return content that looked like the start of a call. Whitespace after a call is dropped."""
        if self._inside:
            return [Content(_OPEN + self._held)] if self._object is None else []
        return [Content(self._held)] if self._held.strip() or (self._held and not self._calls) else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Consume part of the held text; return whether more may be consumed."""
        if not self._inside:
            return self._take_content(pieces)
        if self._object is not None and not self._object.complete:
            self._held = self._object.push(self._held, pieces)
            return self._object.complete
        if self._object is None:
            self._held = self._held.lstrip(_SPACE)
            if not self._held:
                return False
            if self._held[0] == "{":
                self._object = _CallObject(self._calls)
                self._calls += 1
                return True
        end = self._held.find(_CLOSE)
        if end < 0:
            if self._object is None:
                return False  # no call after all; it is passed on as text when the tag closes
            self._held = self._held[-len(_CLOSE) :]
            return False
        if self._object is None:
            pieces.append(Content(_OPEN + self._held[: end + len(_CLOSE)]))
        self._held = self._held[end + len(_CLOSE) :]
        self._inside, self._object = False, None
        return True

    def _take_content(self, pieces: list[Piece]) -> bool:
        start = self._held.find(_OPEN)
        if start >= 0:
            before = self._held[:start].rstrip(_SPACE)
            if before:
                pieces.append(Content(before))
            self._held = self._held[start + len(_OPEN) :]
            self._inside = True
            return True
        certain = len(self._held) - _possible_call_length(self._held)
        if certain:
            pieces.append(Content(self._held[:certain]))
            self._held = self._held[certain:]
        return False


class JsonCalls:
    """Parser of an answer that is one call, several with semicolons between them, or no call."""

    def __init__(self) -> None:
        self._held = ""
        self._is_call: bool | None = None
        self._calls = ForcedCalls()

    def push(self, text: str) -> list[Piece]:
        """Return the pieces; the first characters decide whether the answer is a call."""
        if self._is_call is None:
            self._held += text
            text = self._held
            head = "".join(self._held.split())
            if not head:
                return []
            beginning = '{"name":'
            if head.startswith(beginning):
                self._is_call = True
            elif beginning.startswith(head):
                return []
            else:
                self._is_call = False
        return self._calls.push(text) if self._is_call else [Content(text)]

    def finish(self) -> list[Piece]:
        """Return an undecided answer as text."""
        return [Content(self._held)] if self._is_call is None and self._held else []


class _CallObject:
    """Incremental parser of one JSON object with a name and arguments."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        """The key whose value is being read."""
        self._word = ""
        """The key or short value that is being read."""
        self._begun = False
        self._waiting = ""
        """Arguments that came before the name."""
        self.complete = False

    def push(self, text: str, pieces: list[Piece]) -> str:
        """Read up to the object's end; return the text behind it."""
        arguments = ""
        for position, character in enumerate(text):
            ends = not self._in_string and self._depth == 1 and character in ",}"
            if ends:
                self._end_value(pieces)
            elif self._key in _ARGUMENTS:
                if arguments or self._word or character not in _SPACE:
                    arguments += character
                    self._word = character
            elif self._depth:
                self._word += character
            self._move(character)
            if character == ":" and self._depth == 1 and not self._in_string and self._key is None:
                self._key, self._word = self._word[:-1].strip(_SPACE + '"'), ""
            if self._depth == 0:
                self.complete = True
            if ends or self.complete:
                arguments = self._pass_on(arguments, pieces)
            if self.complete:
                return text[position + 1 :]
        self._pass_on(arguments, pieces)
        return ""

    def _move(self, character: str) -> None:
        """Track strings and nesting."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _end_value(self, pieces: list[Piece]) -> None:
        if self._key == "name":
            try:
                name = str(json.loads(self._word))
            except ValueError:
                name = self._word.strip()
            pieces.append(CallBegun(self._index, f"call_{secrets.token_hex(12)}", name))
            self._begun = True
            waiting, self._waiting = self._waiting, ""
            if waiting:
                pieces.append(CallArguments(self._index, waiting))
        self._key, self._word = None, ""

    def _pass_on(self, arguments: str, pieces: list[Piece]) -> str:
        if arguments and self._begun:
            pieces.append(CallArguments(self._index, arguments))
        else:
            self._waiting += arguments
        return ""


def _possible_call_length(text: str) -> int:
    """Return the number of characters at the end, whitespace included, that may begin a call."""
    for length in range(min(len(_OPEN) - 1, len(text)), 0, -1):
        if _OPEN.startswith(text[-length:]):
            break
    else:
        length = 0
    kept = text[: len(text) - length]
    return length + len(kept) - len(kept.rstrip(_SPACE))
