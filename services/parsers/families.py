"""Parsers for the reasoning and tool call formats of the model families, one generator for each family.

| family | models | reasoning | tool calls |
|---|---|---|---|
| hermes | Qwen 2.5 and 3, Hermes, Granite 4 | <think> | <tool_call>{"name": …, "arguments": …}</tool_call> |
| qwen3_coder | Qwen3-Coder | <think> | <tool_call><function=NAME><parameter=KEY>VALUE</parameter>… |
| llama3_json | Llama 3.1 to 3.3 | – | the whole answer: {"name": …, "parameters": …}; … |
| pythonic | Llama 3.2, Llama 4 | – | the whole answer: [NAME(KEY=VALUE, …), …] |
| mistral | Mistral, Magistral | [THINK] | [TOOL_CALLS][{"name": …, …}] or [TOOL_CALLS]NAME[ARGS]{…} |
| deepseek | DeepSeek V3, V3.1, R1 | <think> | <｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜> |
| harmony | GPT-OSS | channel analysis | channel commentary to=functions.NAME |
| glm4 | GLM-4.5 and later | <think> | <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>… |
| granite | Granite 3 | – | <|tool_call|>[{"name": …, "arguments": …}] |
| gemma4 | Gemma 4 | <|channel>thought | <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, text between <|"|> |

Text that only resembles a call is content. If the output ends within a call, the call has the arguments generated so
far. `call_forms` contains grammars for the same formats.
"""

# ruff: noqa: RUF001  (DeepSeek writes its markers with these characters)

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from services.parsers.calls import Calls, read_object, read_objects
from services.parsers.events import Content, Emit, Reasoning
from services.parsers.reader import SPACE, Reader, Step

Schemas = Mapping[str, Mapping[str, Any]]
"""For each function name, the JSON schema of the function's arguments."""

THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Output:
    """Receiver of the reasoning, content and tool calls that a family's parser finds."""

    emit: Emit
    calls: Calls
    schemas: Schemas
    reasons: bool
    """Whether the output begins within reasoning, because the prompt ends with its opening marker."""

    def content(self, text: str) -> None:
        """Emit content."""
        if text:
            self.emit(Content(text))

    def reasoning(self, text: str) -> None:
        """Emit reasoning."""
        if text:
            self.emit(Reasoning(text))


Read = Callable[[Reader, Output], Step]
"""Reads the outputs of one family."""
ReadCall = Callable[[Reader, Output], Generator[None, None, bool]]
"""Reads a call after its opening tag; returns whether the text was a call. If it was not, the text is content."""


def _think(reader: Reader, output: Output, end: str = _END_THINK) -> Step:
    """Read reasoning after its opening marker."""
    yield from reader.until(output.reasoning, end, trim_start=True, trim_end=True)


def _tagged(reader: Reader, output: Output, read_call: ReadCall) -> Step:
    """Read content with reasoning and calls between the tags that most families use."""
    if output.reasons:
        yield from _think(reader, output)
    trim = output.reasons
    while marker := (yield from reader.until(output.content, THINK, _CALL, trim_start=trim, trim_end=True)):
        trim = True
        if marker == THINK:
            yield from _think(reader, output)
        else:
            trim = yield from read_call(reader, output)


def hermes(reader: Reader, output: Output) -> Step:
    """Read the output of Qwen, Hermes and Granite 4."""
    yield from _tagged(reader, output, _hermes_call)


def _hermes_call(reader: Reader, output: Output) -> Generator[None, None, bool]:
    opening = reader.trimmed + _CALL + (yield from reader.skip_space())
    return (yield from _tagged_object(reader, output, opening))


def _tagged_object(reader: Reader, output: Output, opening: str) -> Generator[None, None, bool]:
    """Read a call as a JSON object after its opening tag, and the closing tag; return whether the text was a call."""
    if (yield from reader.peek()) != "{":
        return (yield from _as_content(reader, output, opening))
    rejected = yield from read_object(reader, output.calls)
    if rejected:
        return (yield from _as_content(reader, output, opening + rejected))
    yield from reader.until(output.content, _END_CALL, trim_start=True, trim_end=True)
    return True


def _as_content(reader: Reader, output: Output, begun: str) -> Generator[None, None, bool]:
    """Emit text that resembled a call as content, up to its closing tag; return False."""
    output.content(begun)
    output.content((yield from reader.until(output.content, _END_CALL)))
    return False


def qwen3_coder(reader: Reader, output: Output) -> Step:
    """Read the output of Qwen3-Coder."""
    yield from _tagged(reader, output, _coder_call)


def _coder_call(reader: Reader, output: Output) -> Generator[None, None, bool]:
    opening = reader.trimmed + _CALL + (yield from reader.skip_space())
    if not (yield from reader.starts_with("<function=")):
        return (yield from _tagged_object(reader, output, opening))
    name, complete = yield from _collect(reader, ">")
    if not complete:
        output.content(opening + "<function=" + name)
        return False
    output.calls.begin(name)
    writer = _Arguments(output, name)
    while True:
        yield from reader.skip_space()
        if not (yield from reader.starts_with("<parameter=")):
            break
        key, complete = yield from _collect(reader, ">")
        if not complete or not (yield from writer.value(reader, key, "</parameter>", newlines=True)):
            return True
    if (yield from reader.peek()):
        writer.end()
    yield from reader.starts_with("</function>")
    yield from reader.until(output.content, _END_CALL, trim_start=True, trim_end=True)
    return True


def glm4(reader: Reader, output: Output) -> Step:
    """Read the output of GLM-4.5 and later."""
    yield from _tagged(reader, output, _glm_call)


def _glm_call(reader: Reader, output: Output) -> Generator[None, None, bool]:
    opening = reader.trimmed + _CALL + (yield from reader.skip_space())
    if (yield from reader.peek()) == "{":
        return (yield from _tagged_object(reader, output, opening))
    name, marker = yield from _collect(reader, "<arg_key>", _END_CALL)
    if not name.strip(SPACE) or not marker:
        output.content(opening + name + marker)
        return False
    output.calls.begin(name.strip(SPACE))
    writer = _Arguments(output, name.strip(SPACE))
    while marker == "<arg_key>":
        key, complete = yield from _collect(reader, "</arg_key>")
        yield from reader.skip_space()
        if not complete or not (yield from reader.starts_with("<arg_value>")):
            break
        if not (yield from writer.value(reader, key.strip(SPACE), "</arg_value>", newlines=False)):
            return True
        yield from reader.skip_space()
        marker = yield from reader.starts_with("<arg_key>", _END_CALL)
    if marker or (yield from reader.peek()):
        writer.end()
    if marker != _END_CALL:
        yield from reader.until(output.content, _END_CALL, trim_start=True, trim_end=True)
    return True


def llama3_json(reader: Reader, output: Output) -> Step:
    """Read the output of Llama 3: the whole answer is calls, or it is content."""
    yield from reader.starts_with("<|python_tag|>")
    yield from _whole_objects(reader, output, "")


def _whole_objects(reader: Reader, output: Output, shown: str, *ends: str) -> Step:
    """Read calls that are the whole answer, and drop the markers `ends` after them."""
    space = yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        output.content(shown + space)
        yield from reader.until(output.content)
        return
    while True:
        # A JSON response may also have a "name".
        rejected = yield from read_object(reader, output.calls, output.schemas)
        if rejected:
            output.content(shown + space + rejected)
            yield from reader.until(output.content)
            return
        shown = space = ""
        yield from reader.skip_space()
        if not (yield from reader.starts_with(";")):
            break
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            break
    yield from reader.until(output.content, *ends, trim_start=True)
    yield from reader.until(output.content)


def pythonic(reader: Reader, output: Output) -> Step:
    """Read Llama 4 output: the whole output is a list of calls in Python's notation, or content.

    A call's arguments are converted when the call ends, because Python literals differ from JSON. The output may also
    contain calls in Llama 3's format.
    """
    opening = yield from reader.starts_with("<|python_start|>")
    space = yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        yield from _whole_objects(reader, output, space, "<|python_end|>")
        return
    if (yield from reader.peek()) != "[":
        output.content(space)
        yield from reader.until(output.content, "<|python_end|>")
        yield from reader.until(output.content)
        return
    read = space + reader.take()
    while True:
        read += yield from reader.skip_space()
        call = yield from _python_call(reader)
        parsed = _parse_python(call)
        if parsed is None or (output.schemas and parsed[0] not in output.schemas):
            output.content((opening if not output.calls.count else "") + read + call)
            yield from reader.until(output.content)
            return
        output.calls.begin(parsed[0])
        output.calls.arguments(parsed[1])
        output.calls.end()
        read = ""
        yield from reader.skip_space()
        if not (yield from reader.starts_with(",")):
            break
    yield from reader.starts_with("]")
    yield from reader.skip_space()
    yield from reader.starts_with("<|python_end|>")
    yield from reader.until(output.content, trim_start=True)


def _python_call(reader: Reader) -> Generator[None, None, str]:
    """Return the text up to the closing parenthesis of a call, or up to a character that cannot begin a call."""
    pieces: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        character = yield from reader.peek()
        if not character or (not depth and not (character.isalnum() or character in "_.-(")):
            return "".join(pieces)
        pieces.append(reader.take())
        if quote:
            quote = quote if escaped or character != quote else ""
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                return "".join(pieces)


def _parse_python(call: str) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON, from Python's notation; None if the text is not a call."""
    name, opening, rest = call.partition("(")
    if not opening or not re.fullmatch(r"[\w.-]+", name):
        return None
    # JSON may escape a slash, for which Python issues a warning.
    source = "f(" + re.sub(r"\\([\\/])", lambda found: found[0] if found[1] == "\\" else "/", rest)
    try:
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        values = {
            each.arg: _python_value(ast.get_source_segment(source, each.value) or "", each.value)
            for each in node.keywords
            if each.arg is not None
        }
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return name, "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items()) + "}"


def _python_value(text: str, node: ast.expr) -> str:
    """Convert a value in Python's notation, or in JSON, which models and grammars also write, to JSON."""
    if _is_json(text):
        return text
    return json.dumps(ast.literal_eval(node), ensure_ascii=False, allow_nan=False)


def mistral(reader: Reader, output: Output) -> Step:
    """Read the output of Mistral and Magistral."""
    if output.reasons:
        yield from _think(reader, output, "[/THINK]")
    trim = output.reasons
    while marker := (
        yield from reader.until(output.content, "[TOOL_CALLS]", "[THINK]", trim_start=trim, trim_end=True)
    ):
        trim = True
        if marker == "[THINK]":
            yield from _think(reader, output, "[/THINK]")
            continue
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{"):
            yield from read_objects(reader, output.calls, output.content)
        else:
            yield from _mistral_call(reader, output)


def mistral_reasoning(reader: Reader, output: Output) -> Step:
    """Read the output of Magistral for a request without tools."""
    yield from _reasoning_and_content(reader, output, "[THINK]", "[/THINK]")


def _mistral_call(reader: Reader, output: Output) -> Step:
    """Read NAME[ARGS]{…}, NAME[CALL_ID]ID[ARGS]{…} or NAME{…}."""
    name = ""
    while True:
        character = yield from reader.peek()
        if not character or not (character.isalnum() or character in "_.-"):
            break
        name += reader.take()
    if not name:
        output.content("[TOOL_CALLS]")
        return
    if (yield from reader.starts_with("[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
        yield from reader.until(lambda _: None, "[ARGS]")
    output.calls.begin(name)
    yield from _json_arguments(reader, output)


def _json_arguments(reader: Reader, output: Output) -> Step:
    """Read the arguments of the latest call, if a JSON object is at this place."""
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{" and (yield from reader.json_value(output.calls.arguments)):
        output.calls.end()


DEEPSEEK_CALL = "<｜tool▁call"
"""Common prefix of DeepSeek's call markers."""
_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_SEP, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def deepseek(reader: Reader, output: Output) -> Step:
    """Read output in the format of DeepSeek V3 and R1 (function, name and a JSON block) or V3.1 (name and JSON)."""
    if output.reasons:
        yield from _think(reader, output)
    trim = output.reasons
    while marker := (
        yield from reader.until(output.content, THINK, _DS_CALLS, _DS_CALL, trim_start=trim, trim_end=True)
    ):
        trim = True
        if marker == THINK:
            yield from _think(reader, output)
            continue
        if marker == _DS_CALLS:
            yield from reader.skip_space()
            marker = yield from reader.starts_with(_DS_CALL)
        while marker == _DS_CALL:
            yield from _deepseek_call(reader, output)
            yield from reader.skip_space()
            marker = yield from reader.starts_with(_DS_CALL)
        yield from reader.starts_with(_DS_CALLS_END)


def _deepseek_call(reader: Reader, output: Output) -> Step:
    head, complete = yield from _collect(reader, _DS_SEP)
    if not complete:
        output.content(_DS_CALL + head)
        return
    if head.strip(SPACE) == "function" and (yield from reader.peek()) != "{":
        head, _ = yield from _collect(reader, "\n")
        yield from reader.skip_space()
        yield from reader.starts_with("```json", "```")
    output.calls.begin(head.strip(SPACE))
    yield from _json_arguments(reader, output)
    yield from reader.skip_space()
    yield from reader.starts_with("```")
    yield from reader.until(output.content, _DS_CALL_END, trim_start=True, trim_end=True)


_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_RECIPIENT_BEGIN = " to="
"""Possible beginnings of an output: the recipient is behind the role, or behind the channel."""
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(reader: Reader, output: Output) -> Step:
    """Read the output of GPT-OSS: messages in channels, the first header without its start and role."""
    opening = yield from reader.starts_with(_START, _CHANNEL, _RECIPIENT_BEGIN)
    if not opening:
        yield from reader.until(output.content)
        return
    while opening:
        header, complete = yield from _collect(reader, _MESSAGE)
        if not complete:
            output.content(opening + header)
            return
        recipient = _RECIPIENT.search(opening + header)
        channel = header if opening == _CHANNEL else header.partition(_CHANNEL)[2]
        if recipient is not None:
            output.calls.begin(recipient[1])
            yield from _json_arguments(reader, output)
            yield from reader.until(output.content, *_ENDS, trim_start=True, trim_end=True)
        elif channel.strip(SPACE).startswith("analysis"):
            yield from reader.until(output.reasoning, *_ENDS)
        else:
            yield from reader.until(output.content, *_ENDS)
        opening = yield from reader.until(output.content, _START, _CHANNEL, trim_start=True)


def granite(reader: Reader, output: Output) -> Step:
    """Read the output of Granite 3."""
    trim = False
    while (yield from reader.until(output.content, "<|tool_call|>", "<tool_call>", trim_start=trim, trim_end=True)):
        trim = True
        yield from reader.skip_space()
        yield from read_objects(reader, output.calls, output.content)


GEMMA_THINK, GEMMA_END_THINK = "<|channel>", "<channel|>"
_GEMMA_CALL, _GEMMA_END_CALL, _GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


def gemma4(reader: Reader, output: Output) -> Step:
    """Read the output of Gemma 4."""
    yield from _gemma(reader, output, _GEMMA_CALL)


def gemma4_reasoning(reader: Reader, output: Output) -> Step:
    """Read the output of Gemma 4 for a request without tools."""
    yield from _gemma(reader, output)


def _gemma(reader: Reader, output: Output, *calls: str) -> Step:
    if output.reasons:
        yield from _gemma_think(reader, output)
    trim = output.reasons
    while marker := (yield from reader.until(output.content, GEMMA_THINK, *calls, trim_start=trim, trim_end=True)):
        if marker == GEMMA_THINK:
            trim = True
            yield from _gemma_think(reader, output)
        else:
            trim = yield from _gemma_call(reader, output)


def _gemma_think(reader: Reader, output: Output) -> Step:
    """Read reasoning after its opening marker, without the name of its channel."""
    yield from reader.starts_with("thought\n")
    yield from _think(reader, output, GEMMA_END_THINK)


def _gemma_call(reader: Reader, output: Output) -> Generator[None, None, bool]:
    """Read a call after its opening marker; return whether the text was a call."""
    opening = reader.trimmed + _GEMMA_CALL + (yield from reader.starts_with("call:"))
    name = ""
    while (character := (yield from reader.peek())) and (character.isalnum() or character in "_.-"):
        name += reader.take()
    if not opening.endswith("call:") or not name or character != "{":
        output.content(opening + name)
        return False
    output.calls.begin(name)
    if (yield from _gemma_object(reader, output.calls.arguments)):
        output.calls.end()
    return True


def _gemma_object(reader: Reader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read an object, and the closing marker of its call; return whether the object is complete.

    Keys have no quotes, and text is between markers. JSON is read too. The object is emitted as JSON. A bracket of the
    other kind closes an object or an array too, and the closing marker closes all.
    """
    emit(reader.take())
    closing = ["}"]
    """The closing brackets of the open objects and arrays."""
    is_first, key_is_read = True, False
    while True:
        yield from reader.skip_space()
        if (yield from reader.starts_with(_GEMMA_END_CALL)):
            emit(("null" if key_is_read else "") + "".join(reversed(closing)))
            return True
        character = yield from reader.peek()
        if not character or not closing:
            return not closing
        if key_is_read:
            is_first = key_is_read = False
        elif character in ",}]":
            reader.take()
            if character != ",":
                emit(closing.pop())
                is_first = False
            continue
        else:
            emit("" if is_first else ", ")
            is_first = False
            if closing[-1] == "}":
                emit(json.dumps((yield from _gemma_key(reader)), ensure_ascii=False) + ": ")
                key_is_read = True
                continue
        if character in "{[":
            emit(reader.take())
            closing.append("}" if character == "{" else "]")
            is_first = True
        elif not (yield from _gemma_scalar(reader, emit)):
            return False


def _gemma_key(reader: Reader) -> Generator[None, None, str]:
    """Read a key and its colon; return the key."""
    if (yield from reader.starts_with(_GEMMA_QUOTE)):
        key, _ = yield from _collect(reader, _GEMMA_QUOTE)
    elif (yield from reader.peek()) == '"':
        pieces: list[str] = []
        yield from reader.json_value(pieces.append)
        text = "".join(pieces)
        key = str(json.loads(text)) if _is_json(text) else text.strip('"')
    else:
        key = (yield from _gemma_bare(reader, ":,{}[]<")).strip(SPACE)
    yield from reader.skip_space()
    yield from reader.starts_with(":")
    return key


def _gemma_bare(reader: Reader, ends: str) -> Generator[None, None, str]:
    """Return the text up to one of the characters `ends`, but at least one character."""
    text = ""
    while (character := (yield from reader.peek())) and (not text or character not in ends):
        text += reader.take()
    return text


def _gemma_scalar(reader: Reader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read a value without brackets, and emit it as JSON; return whether it is complete."""
    if (yield from reader.starts_with(_GEMMA_QUOTE)):
        emit('"')
        if not (yield from reader.until(lambda text: emit(_escaped(text)), _GEMMA_QUOTE)):
            return False
        emit('"')
        return True
    character = yield from reader.peek()
    if character == '"':
        return (yield from reader.json_value(emit))
    text = "null" if character in ",}]" else (yield from _gemma_bare(reader, ",}]<")).strip(SPACE)
    emit("null" if text == "None" else _as_json(text))
    return bool((yield from reader.peek()))


def plain(reader: Reader, output: Output) -> Step:
    """Read the output of a model without tool calls and reasoning."""
    yield from reader.until(output.content)


def reasoning_only(reader: Reader, output: Output) -> Step:
    """Read the output of a model with reasoning between tags and without tool calls."""
    yield from _reasoning_and_content(reader, output, THINK, _END_THINK)


def _reasoning_and_content(reader: Reader, output: Output, opening: str, closing: str) -> Step:
    if output.reasons:
        yield from _think(reader, output, closing)
    trim = output.reasons
    while (yield from reader.until(output.content, opening, trim_start=trim, trim_end=True)):
        trim = True
        yield from _think(reader, output, closing)


def _collect(reader: Reader, *ends: str) -> Generator[None, None, tuple[str, str]]:
    """Return the text before the first of `ends`, and the end found; the latter is empty if the output ended."""
    pieces: list[str] = []
    end = yield from reader.until(pieces.append, *ends)
    return "".join(pieces), end


class _Arguments:
    """Converts the arguments of a call whose values are text to one JSON object."""

    def __init__(self, output: Output, name: str) -> None:
        self._calls = output.calls
        properties = output.schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._empty = True

    def value(self, reader: Reader, key: str, end: str, *, newlines: bool) -> Generator[None, None, bool]:
        """Read the value of a key up to its closing tag.

        Args:
            reader: the output.
            key: the name of the argument.
            end: the closing tag.
            newlines: whether newlines directly after the opening tag and before the closing tag belong to the tags.

        Returns:
            whether the value is complete.
        """
        self._calls.arguments(("{" if self._empty else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._empty = False
        if newlines:
            yield from reader.starts_with("\n")
        ends = ("\n" + end, end) if newlines else (end,)
        if self._is_string(key):
            self._calls.arguments('"')
            if not (yield from reader.until(lambda text: self._calls.arguments(_escaped(text)), *ends)):
                return False
            self._calls.arguments('"')
            return True
        text, complete = yield from _collect(reader, *ends)
        self._calls.arguments(_as_json(text))
        return bool(complete)

    def end(self) -> None:
        """Close the object and the call."""
        self._calls.arguments("{}" if self._empty else "}")
        self._calls.end()

    def _is_string(self, key: str) -> bool:
        schema = self._properties.get(key)
        return isinstance(schema, Mapping) and schema.get("type") == "string"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Return a value as JSON: itself if it is JSON, otherwise a string."""
    return text if _is_json(text) else json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """Refuse NaN and infinity, which JSON does not have."""
    raise ValueError(constant)
