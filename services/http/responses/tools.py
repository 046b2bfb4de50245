"""Converts Responses tools to chat functions, and calls to these functions to items.

A chat supports only functions. A tool in a namespace becomes a function whose name begins with the namespace's name. A
custom tool, which takes text instead of JSON, becomes a function with one string parameter. Tools that run on OpenAI's
servers are omitted, because the model cannot call them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from services.http.responses.schema import ResponseTool
from shared.json_text import read_json_text

Json = dict[str, Any]

_INPUT = "input"
"""Name of the only parameter in a custom tool's function."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model can call."""

    name: str
    namespace: str
    """Namespace of the tool; empty for none."""
    description: str
    parameters: Json | None
    strict: bool | None
    """Whether its calls must follow the schema."""
    custom: bool
    """Whether it takes text."""
    field: str
    """Its path in the request."""

    @property
    def function(self) -> str:
        return function_name(self.namespace, self.name)


def function_name(namespace: str, name: str) -> str:
    """Return the name of a tool's function."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def callable_tools(tools: Iterable[ResponseTool] | None) -> list[CallableTool]:
    """Return the tools that the model can call."""
    return [*_callable(tools or (), "", "tools")]


def _callable(tools: Iterable[ResponseTool], namespace: str, path: str) -> Iterator[CallableTool]:
    for number, tool in enumerate(tools):
        field = f"{path}[{number}]"
        description = tool.description or ""
        match tool.type:
            case "function":
                yield CallableTool(
                    tool.name, namespace, description, tool.parameters, tool.strict, custom=False, field=field
                )
            case "custom":
                yield CallableTool(
                    tool.name, namespace, description + _form(tool), _TEXT, None, custom=True, field=field
                )
            case "namespace":
                yield from _callable(tool.tools or (), tool.name, f"{field}.tools")


_TEXT: Json = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "the tool's input as plain text"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
"""Parameters of a custom tool's function."""


def _form(tool: ResponseTool) -> str:
    """Return a sentence that describes a custom tool's input format; empty for free text."""
    form = tool.format or {}
    grammar = form.get("grammar", form)
    if form.get("type") != "grammar" or not isinstance(grammar, dict):
        return ""
    return f"\n\nThe input follows this grammar ({grammar.get('syntax', '')}):\n{grammar.get('definition', '')}"


def custom_arguments(text: str) -> str:
    """Return the arguments of a custom tool's function."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a custom tool's function, which may be truncated.

    Arguments of any other form are returned unchanged as the text.
    """
    try:
        parsed = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        try:
            parsed = read_json_text(arguments)  # It may contain half a surrogate pair.
        except (ValueError, RecursionError):
            return arguments
    text = parsed.get(_INPUT, "" if not parsed else None) if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments
