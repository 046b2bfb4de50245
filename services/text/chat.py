"""Conversations: validates the public message and converts it to the input of chat templates.

Tools, tool calls and template variables are JSON text in the public message, because templates expect model-specific
objects. This module parses the text once and limits its size and depth.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_pb2 as v1
from shared.errors import FieldViolation
from shared.json_text import describe_json_error, read_json_text

MAX_MESSAGES = 4096
"""Maximum number of messages of a conversation."""
MAX_ROLE = 64
"""Maximum length of a role, bytes."""
MAX_NAME = 256
"""Maximum length of a name or a tool call id, bytes."""
MAX_CONTENT = 4 << 20
"""Maximum length of a message's content, bytes."""
MAX_TOOLS = 1 << 20
"""Maximum length of JSON text with tools or tool calls, bytes."""
MAX_VARIABLES = 64 << 10
"""Maximum length of JSON text with template variables, bytes."""

MAX_JSON_VALUES = 1 << 18
"""Maximum number of values in a conversation's JSON texts. Many small values take long to read."""

_MAX_DEPTH = 64
"""Maximum nesting depth of JSON text."""
_TOO_DEEP = f"nested too deeply; nest at most {_MAX_DEPTH} levels"
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """Input of a chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def chat_size(chat: v1.ChatInput) -> int:
    """Return the approximate number of characters to render."""
    return len(chat.tools_json) + sum(
        len(message.role) + len(message.content) + len(message.tool_calls_json) for message in chat.messages
    )


def template_input(chat: v1.ChatInput) -> TemplateInput:
    """Return the template's input for a valid conversation."""
    shows_tools = chat.tool_choice.mode != v1.TOOL_MODE_NONE
    return TemplateInput(
        messages=[_message(message) for message in chat.messages],
        tools=read_json_text(chat.tools_json) if chat.tools_json and shows_tools else None,
        variables=read_json_text(chat.template_variables_json) if chat.template_variables_json else {},
        add_generation_prompt=not (chat.omit_generation_prompt or chat.continue_final_message),
        continue_final_message=chat.continue_final_message,
    )


def check_chat(chat: v1.ChatInput, has_chat_template: bool) -> Iterator[FieldViolation]:
    """Yield the violations of a conversation, field by field."""
    if not has_chat_template:
        yield FieldViolation("chat", "the served model has no chat template; send `text` or `token_ids`")
    if not chat.messages:
        yield FieldViolation("chat.messages", "must not be empty; use at least one message")
    elif len(chat.messages) > MAX_MESSAGES:
        yield FieldViolation("chat.messages", f"too many messages; use at most {MAX_MESSAGES}")
    if sum(map(_num_values, _json_texts(chat))) > MAX_JSON_VALUES:
        what = (
            f"has more than {MAX_JSON_VALUES} values in the JSON of tools and tool calls; send fewer or smaller calls"
        )
        yield FieldViolation("chat.messages", what)
        return
    for index, message in enumerate(chat.messages[:MAX_MESSAGES]):
        yield from _check_message(message, f"chat.messages[{index}]")
    yield from _check_json(chat.tools_json, "chat.tools_json", list, MAX_TOOLS)
    yield from _check_json(chat.template_variables_json, "chat.template_variables_json", dict, MAX_VARIABLES)
    if chat.continue_final_message and chat.messages and not chat.messages[-1].content.strip():
        yield FieldViolation(
            "chat.continue_final_message", "the last message is empty; give it content or unset this field"
        )


def _json_texts(chat: v1.ChatInput) -> Iterator[str]:
    yield chat.tools_json
    yield chat.template_variables_json
    for message in chat.messages[:MAX_MESSAGES]:
        yield message.tool_calls_json


def _num_values(text: str) -> int:
    """Return an upper bound on the number of values in JSON text, including JSON inside its strings."""
    return text.count(",") + text.count("[") + text.count("{")


def _check_message(message: v1.ChatMessage, field: str) -> Iterator[FieldViolation]:
    if not 0 < len(message.role.encode()) <= MAX_ROLE:
        yield FieldViolation(f"{field}.role", f"must have 1 to {MAX_ROLE} bytes")
    if len(message.content.encode()) > MAX_CONTENT:
        yield FieldViolation(f"{field}.content", f"too long; use at most {MAX_CONTENT} bytes")
    for name in ("name", "tool_call_id"):
        if len(getattr(message, name).encode()) > MAX_NAME:
            yield FieldViolation(f"{field}.{name}", f"too long; use at most {MAX_NAME} bytes")
    yield from _check_json(message.tool_calls_json, f"{field}.tool_calls_json", list, MAX_TOOLS, _arguments_too_deep)


def _check_json(
    text: str, field: str, kind: type, limit: int, is_too_deep: Callable[[Any], bool] | None = None
) -> Iterator[FieldViolation]:
    """Yield the violations of JSON text.

    Args:
        text: the text; empty if not given.
        field: its path.
        kind: type of the value.
        limit: maximum length, bytes.
        is_too_deep: an additional condition on the nesting of the value.
    """
    if not text:
        return
    what = "array" if kind is list else "object"
    if len(text.encode()) > limit:
        yield FieldViolation(field, f"too long; use at most {limit} bytes")
        return
    try:
        value = read_json_text(text)
    except ValueError as error:
        yield FieldViolation(field, describe_json_error(error))
        return
    except RecursionError:
        yield FieldViolation(field, _TOO_DEEP)
        return
    if _is_too_deep(value) or (is_too_deep is not None and is_too_deep(value)):
        yield FieldViolation(field, _TOO_DEEP)
    elif not isinstance(value, kind):
        yield FieldViolation(field, f"must be a JSON {what}")
    elif isinstance(value, list) and not all(isinstance(each, dict) for each in value):
        yield FieldViolation(field, "must be an array of objects")
    elif isinstance(value, dict) and not _RESERVED.isdisjoint(value):
        yield FieldViolation(
            field, f"must not set {', '.join(sorted(_RESERVED & value.keys()))}, which the server sets"
        )


def _is_too_deep(value: object) -> bool:
    """Return whether arrays and objects are nested more deeply than templates may expect."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > _MAX_DEPTH:
            return True
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return False


def _arguments_too_deep(calls: object) -> bool:
    """Return whether the arguments of a tool call, which are JSON text inside the call, are nested too deeply."""
    for call in calls if isinstance(calls, list) else ():
        arguments = _arguments_of(call)
        try:
            if arguments is not None and _is_too_deep(read_json_text(arguments)):
                return True
        except ValueError:
            continue  # Text that is not JSON has no nesting depth.
        except RecursionError:
            return True
    return False


def _message(message: v1.ChatMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls_json:
        turn["tool_calls"] = [_call(call) for call in read_json_text(message.tool_calls_json)]
    return turn


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as templates expect it: with arguments as an object. OpenAI clients send them as text."""
    text = _arguments_of(call)
    if text is None:
        return call
    try:
        arguments = read_json_text(text)
    except ValueError:
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def _arguments_of(call: object) -> str | None:
    """Return the JSON text with the arguments of a tool call, or None if they are no text."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None
