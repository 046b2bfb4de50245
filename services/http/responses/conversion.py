"""Converts a Responses request to a chat: items become messages, tools and formats those of chat completions."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from services.http.responses.schema import (
    AllowedResponseTools,
    InputItem,
    InputPart,
    NamedResponseTool,
    ResponsesBody,
    ResponseTool,
)
from services.http.responses.tools import callable_tools, custom_arguments, function_name
from services.http.runner import ConvertedChat, options_of
from services.http.schema import SamplingOptions, ScheduledBody
from shared.errors import FieldViolation, InvalidRequestError

Json = dict[str, Any]

_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs": "reasoning.effort",
}
"""Field names of this API for chat fields, for use in errors."""
_CLIENT_TOOLS = ("local_shell", "shell", "apply_patch", "computer_use_preview")
"""Types of client tools whose schemas only OpenAI's models know."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "refusal")


def to_chat(body: ResponsesBody, earlier: list[Json]) -> ConvertedChat:
    """Return the chat; `earlier` are the messages of the previous response's conversation, without instructions.

    Raises:
        InvalidRequestError: an item or a tool is not supported.
    """
    messages = [({"role": "system", "content": body.instructions}, "instructions")] if body.instructions else []
    messages += [(message, "previous_response_id") for message in earlier]
    messages += _messages(body.input)
    names = _FIELDS | {f"messages[{number}]": name for number, (_, name) in enumerate(messages)}
    chat: Json = {
        "model": body.model,
        "messages": [message for message, _ in messages],
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        **options_of(body, ScheduledBody),
        **options_of(body, SamplingOptions),
        "prompt_cache_retention": body.prompt_cache_retention,
    }
    _refuse_own_tools(body.tools or ())
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.function,
                "description": tool.description or None,
                "parameters": tool.parameters,
                "strict": tool.strict,
            },
        }
        for tool in callable_tools(body.tools)
    ]
    if tools:
        chat["tools"] = tools
    if tools or _forces(body.tool_choice):
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    for number, tool in enumerate(callable_tools(body.tools)):
        names |= {f"tools[{number}]": tool.field, f"tools[{number}].function": tool.field}
    form = body.text.format if body.text is not None else None
    if form is not None and form.type != "text":
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise InvalidRequestError(FieldViolation("text.format.schema", "missing; it is required"))
            chat["response_format"]["json_schema"] = {"schema": form.schema_}
    return ConvertedChat(chat, names)


def to_messages(items: str | Iterable[InputItem]) -> list[Json]:
    """Return the items as chat messages; the tool calls of one turn form one message.

    Raises:
        InvalidRequestError: an item is not supported.
    """
    return [message for message, _ in _messages(items)]


def _messages(items: str | Iterable[InputItem]) -> list[tuple[Json, str]]:
    """Return the messages, each with the field of the request from which it is made."""
    if isinstance(items, str):
        return [({"role": "user", "content": items}, "input")]
    messages: list[tuple[Json, str]] = []
    for number, item in enumerate(items):
        for message in _message(item, f"input[{number}]"):
            last = messages[-1][0] if messages else {}
            if message.get("tool_calls") and last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
            else:
                messages.append((message, f"input[{number}]"))
    return messages


def _message(item: InputItem, field: str) -> Iterator[Json]:
    match item.type:
        case "message":
            if not item.role:
                raise InvalidRequestError(FieldViolation(f"{field}.role", "missing; it is required"))
            yield {"role": item.role, "content": _text(item.content, f"{field}.content")}
        case "function_call":
            yield _call(item, function_name(item.namespace, item.name), item.arguments)
        case "custom_tool_call":
            yield _call(item, function_name(item.namespace, item.name), custom_arguments(item.input))
        case "local_shell_call":
            yield _call(item, "local_shell", json.dumps(item.action or {}))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            call_id = item.call_id or item.id
            yield {"role": "tool", "tool_call_id": call_id, "content": _text(item.output, f"{field}.output")}
        case "reasoning" | "web_search_call":
            pass  # Omit reasoning and searches, because models are trained without those of earlier turns.
        case _:
            what = f"items of type {item.type[:64]!r} are not supported"
            remedy = "send messages, calls of functions and custom tools, their outputs, and reasoning"
            raise InvalidRequestError(FieldViolation(f"{field}.type", f"{what}; {remedy}"))


def _call(item: InputItem, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": item.call_id or item.id, "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _text(content: str | list[InputPart] | None, field: str) -> str:
    if content is None:
        raise InvalidRequestError(FieldViolation(field, "missing; add a text"))
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            what = f"parts of type {part.type[:64]!r} are not supported, because the server reads text only"
            raise InvalidRequestError(FieldViolation(f"{field}[{number}].type", f"{what}; send text parts"))
    return "".join(part.text for part in content)


def _refuse_own_tools(tools: Iterable[ResponseTool]) -> None:
    for number, tool in enumerate(tools):
        if tool.type in _CLIENT_TOOLS:
            raise InvalidRequestError(
                FieldViolation(
                    f"tools[{number}].type",
                    f"{tool.type!r} is not supported, because it has no schema; use a function that does the same",
                )
            )


def _forces(choice: str | NamedResponseTool | AllowedResponseTools | None) -> bool:
    return choice is not None and choice not in ("auto", "none")


def _tool_choice(choice: str | NamedResponseTool | AllowedResponseTools | None) -> str | Json | None:
    match choice:
        case NamedResponseTool():
            return _named(choice)
        case AllowedResponseTools():
            allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def _named(tool: NamedResponseTool) -> Json:
    return {"type": "function", "function": {"name": function_name(tool.namespace, tool.name)}}
