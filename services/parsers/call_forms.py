"""Grammars for the tool call format of each family; `families` parses the same formats.

A form returns an expression for the output after the reasoning. Families that write arguments between tags or in
Python's notation write one property at a time. If a function's schema contains more than properties, the arguments are
a JSON object, which these families' parsers also accept.
"""

# ruff: noqa: RUF001  (DeepSeek writes its markers with these characters)

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.parsers.call_schema import DEFINITIONS, NotWritableError, without_text
from services.parsers.functions import Function
from services.parsers.grammar_writer import GrammarWriter

Form = Callable[[GrammarWriter, Sequence[Function]], str]
"""Returns an expression for an output that calls functions."""

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_PLAIN_KEYWORDS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "description",
    "title",
    "$schema",
    *DEFINITIONS,
}
"""Schema keywords that are permitted if properties are written one by one."""
_FREE_TEXT = {"type", "description", "title", "default", "examples"}
"""Keywords of a string that may be any text."""
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
"""Matches a JSON reference that does not point to the definitions."""


def hermes(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Qwen, Hermes and Granite 4."""
    return writer.calls(_CALL, writer.any_of(_tagged_object(writer, each) for each in functions), "\n")


def _tagged_object(writer: GrammarWriter, function: Function) -> str:
    return writer.object_call(function, "arguments", begin="\n", end=("\n", _END_CALL))


def qwen3_coder(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Qwen3-Coder."""

    def value(key: str, schema: Mapping[str, Any], function: Function) -> str:
        return _tagged(writer, (f"<parameter={key}>\n",), "\n", "</parameter>", schema, function)

    def call(function: Function) -> str:
        try:
            values = _tagged_values(function, value)
        except NotWritableError:
            return _tagged_object(writer, function)
        opened = writer.text(f"\n<function={function.name}>\n")
        return f"{opened} {values} {writer.text('</function>' + chr(10), _END_CALL)}"

    return writer.calls(_CALL, writer.any_of(map(call, functions)), "\n")


def glm4(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of GLM-4.5 and later."""

    def value(key: str, schema: Mapping[str, Any], function: Function) -> str:
        opening = ("<arg_key>", key, "</arg_key>", "\n", "<arg_value>")
        return _tagged(writer, opening, "", "</arg_value>", schema, function)

    def call(function: Function) -> str:
        try:
            values = _tagged_values(function, value)
        except NotWritableError:
            return _tagged_object(writer, function)
        return f"{writer.text(function.name + chr(10))} {values} {writer.text(_END_CALL)}"

    return writer.calls(_CALL, writer.any_of(map(call, functions)), "\n")


def llama3_json(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Llama 3: the whole answer is calls."""
    return writer.calls("", writer.any_of(writer.object_call(each, "parameters") for each in functions), "; ")


def pythonic(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for Llama 4 output: the whole output is a list of calls in Python's notation.

    Values are JSON, which is valid Python except for its constants. The parser accepts the constants of both.
    """

    def value(key: str, schema: Mapping[str, Any], function: Function) -> str:
        if not key.isidentifier() or keyword.iskeyword(key):
            raise NotWritableError
        constant = (
            '("True" | "False")' if schema.get("type") == "boolean" else writer.json(schema, _definitions(function))
        )
        return f"{writer.text(key + '=')} {constant}"

    def call(function: Function) -> str:
        values = _separated_values(writer, function, value, ", ")
        return f"{writer.text(function.name + '(')} {values} {writer.text(')')}"

    try:
        return writer.calls("", writer.list_of(writer.any_of([call(each) for each in functions])), None)
    except NotWritableError:
        return llama3_json(writer, functions)


def mistral(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Mistral and Magistral."""
    marker = "[TOOL_CALLS]"
    if "[ARGS]" not in writer.template:
        one = writer.any_of(writer.object_call(each, "arguments") for each in functions)
        return writer.calls(marker, writer.list_of(one), None)
    one = writer.any_of(f"{writer.text(each.name, '[ARGS]')} {writer.arguments(each)}" for each in functions)
    return writer.calls(marker, one, "")


def deepseek(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of DeepSeek.

    Calls contain a code block of JSON in V3 and R1, and JSON in V3.1.
    """
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    has_blocks = "```json" in writer.template

    def call(function: Function) -> str:
        if has_blocks:
            opened = writer.text(begin, "function", separator, f"{function.name}\n```json\n")
            return f"{opened} {writer.arguments(function)} {writer.text(chr(10) + '```', end)}"
        return f"{writer.text(begin, function.name, separator)} {writer.arguments(function)} {writer.text(end)}"

    one = writer.any_of(map(call, functions))
    more = "" if writer.single else f"({writer.text(chr(10) if has_blocks else '')} {one})*"
    return writer.calls("<｜tool▁calls▁begin｜>", f"{one} {more} {writer.text('<｜tool▁calls▁end｜>')}", None, begin)


def harmony(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of GPT-OSS: messages in channels, ending with a call or the response."""

    def message(header: str) -> str:
        return writer.text("<|channel|>", header, "<|message|>")

    def call(function: Function) -> str:
        recipient = f"commentary to=functions.{function.name} "
        header = writer.text("<|channel|>", recipient, "<|constrain|>", "json", "<|message|>")
        return f"{header} {writer.arguments(function)}"

    end, *others = "<|end|>", "<|return|>", "<|call|>"
    next_message = f"{writer.until(end, *others)} {writer.text('<|start|>', 'assistant')}"
    calls = writer.any_of(map(call, functions))
    if writer.required:
        return f"({message('analysis')} {next_message})? {calls}"
    before = f"(({message('analysis')} | {message('commentary')}) {next_message})*"
    return f"{before} ({calls} | {message('final')} {writer.without(end, *others)})"


def granite(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Granite 3."""
    one = writer.any_of(writer.object_call(each, "arguments") for each in functions)
    return writer.calls("<|tool_call|>", writer.list_of(one), None, _CALL)


def gemma4(writer: GrammarWriter, functions: Sequence[Function]) -> str:
    """Return an expression for an output of Gemma 4."""
    marker, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'

    def value(key: str, schema: Mapping[str, Any], function: Function) -> str:
        opening = writer.text(f"{key}:")
        if schema.get("type") != "string":
            return f"{opening} {writer.json(schema, _definitions(function))}"
        if schema.keys() <= _FREE_TEXT:
            return f"{opening} {writer.text(quote)} {writer.until(quote)}"
        choices = _choices(schema, quote)
        return f"{opening} {writer.any_of(writer.text(quote, each, quote) for each in choices)}"

    def call(function: Function) -> str:
        opening = writer.text(f"call:{function.name}")
        try:
            values = _separated_values(writer, function, value, ",")
        except NotWritableError:
            return f"{opening} {writer.arguments(function)} {writer.text(end)}"
        return f"{opening} {writer.text('{')} {values} {writer.text('}', end)}"

    return writer.calls(marker, writer.any_of(map(call, functions)), "")


Value = Callable[[str, Mapping[str, Any], Function], str]
"""Returns an expression for a property: its name, its schema, the function."""


def _tagged_values(function: Function, value: Value) -> str:
    """Return an expression for the properties of a function, one after the other."""
    required = function.parameters.get("required", ())
    return " ".join(each if key in required else f"({each})?" for key, each in _values(function, value))


def _separated_values(writer: GrammarWriter, function: Function, value: Value, separator: str) -> str:
    """Return an expression for the properties of a function, with a separator between them."""
    # The first property has no separator before it, so the rule depends on whether a property precedes it.
    following = first = '""'
    for key, each in reversed(_values(function, value)):
        one = writer.any_of([each])
        more, begun = f"{json.dumps(separator)} {one} {following}", f"{one} {following}"
        if key in function.parameters.get("required", ()):
            following, first = writer.any_of([more]), writer.any_of([begun])
        else:
            following, first = writer.any_of([more, following]), writer.any_of([begun, first])
    return first


def _values(function: Function, value: Value) -> list[tuple[str, str]]:
    """Return the name and an expression of each property.

    Raises: NotWritableError: the schema has other constraints than its properties.
    """
    parameters = function.parameters
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    is_plain = (
        parameters.keys() <= _PLAIN_KEYWORDS
        and parameters.get("type", "object") == "object"
        and parameters.get("additionalProperties") in (None, False)
        and isinstance(properties, dict)
        and isinstance(required, list)
        and all(key in properties for key in required)
        and all(isinstance(each, dict) and re.fullmatch(r"[\w.-]+", key) for key, each in properties.items())
    )
    if not is_plain or _REFERENCE.search(json.dumps(parameters)):
        raise NotWritableError
    return [(key, value(key, each, function)) for key, each in properties.items()]


def _definitions(function: Function) -> dict[str, Any]:
    return {key: function.parameters[key] for key in DEFINITIONS if key in function.parameters}


def _tagged(
    writer: GrammarWriter,
    opening: Sequence[str],
    closing: str,
    end: str,
    schema: Mapping[str, Any],
    function: Function,
) -> str:
    """Return an expression for a value between tags, and the newline after it.

    Args:
        writer: the writer.
        opening: the texts before the value.
        closing: the text between the value and its closing tag.
        end: the closing tag.
        schema: the schema of the value.
        function: the function.

    Raises:
        NotWritableError: the value is text with a constraint, or JSON that may contain the closing tag.
    """
    if schema.get("type") != "string":
        definitions = {
            keyword: {name: without_text(each, end) for name, each in own.items()}
            for keyword, own in _definitions(function).items()
            if "$ref" in json.dumps(schema)
        }
        value = writer.json(without_text(schema, end), definitions)
        return f"{writer.text(*opening)} {value} {writer.text(closing, end, chr(10))}"
    if schema.keys() <= _FREE_TEXT:
        return f"{writer.text(*opening)} {writer.until(end)} {writer.text(chr(10))}"
    chosen = writer.any_of(json.dumps(each) for each in _choices(schema, end))
    return f"{writer.text(*opening)} {chosen} {writer.text(closing, end, chr(10))}"


def _choices(schema: Mapping[str, Any], end: str) -> list[str]:
    """Return the texts that a schema permits.

    Raises: NotWritableError: the schema has another constraint, or a text contains `end`.
    """
    choices = schema.get("enum")
    if not isinstance(choices, list) or not schema.keys() <= _FREE_TEXT | {"enum"}:
        raise NotWritableError
    if not choices or not all(isinstance(each, str) and end not in each for each in choices):
        raise NotWritableError
    return choices
