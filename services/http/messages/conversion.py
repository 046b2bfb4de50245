"""Converts a Messages request to a chat: blocks become messages, and tools become tools of chat completions."""

import json
from collections.abc import Iterator
from typing import Any

from services.http.messages.schema import Block, CountTokensBody, MessagesBody, MessagesTool, Turn
from services.http.runner import ConvertedChat, options_of
from services.http.schema import ScheduledBody
from shared.errors import FieldViolation, InvalidRequestError

Json = dict[str, Any]

_FIELDS = {
    "stop": "stop_sequences",
    "messages": "messages",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
}
"""Field names of this API for chat fields, for use in errors."""
_BILLING = "x-anthropic-billing-header:"
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "mcp_toolset", "advisor_")
"""Type prefixes of tools that run on Anthropic's servers."""
_LIFETIMES_S = {"5m": 300.0, "1h": 3600.0}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: CountTokensBody) -> ConvertedChat:
    """Return the chat.

    Raises:
        InvalidRequestError: a block is not supported.
    """
    messages: list[tuple[Json, str]] = []
    if system := _system(body.system):
        messages.append(({"role": "system", "content": system}, "system"))
    for number, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{number}]")
    names = _FIELDS | {f"messages[{number}]": name for number, (_, name) in enumerate(messages)}
    chat: Json = {
        "model": body.model,
        "messages": [message for message, _ in messages],
        **options_of(body, ScheduledBody),
    }
    if body.retention_s is None:
        chat["retention_s"] = max(_lifetimes(body), default=None)
    tools: list[MessagesTool] = []
    for number, tool in enumerate(body.tools or ()):
        if _is_callable(tool, f"tools[{number}]"):
            name = f"tools[{len(tools)}]"
            names |= {name: f"tools[{number}]", f"{name}.function": f"tools[{number}]"}
            names[f"{name}.function.parameters"] = f"tools[{number}].input_schema"
            tools.append(tool)
    choice = body.tool_choice
    if tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in tools
        ]
    if choice is not None and (tools or choice.type in ("any", "tool")):
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config
    if config is not None:
        chat["reasoning_effort"] = config.effort
    form = (config.format if config is not None else None) or body.output_format
    if form is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        chat |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return ConvertedChat(chat, names)


def _lifetimes(body: CountTokensBody) -> Iterator[float]:
    """Yield the times to live that the request's cache breakpoints specify, s."""
    contents = [body.system, *(turn.content for turn in body.messages)]
    marked: list[Block | MessagesTool | CountTokensBody] = [body, *(body.tools or ())]
    for content in contents:
        for block in () if content is None or isinstance(content, str) else content:
            marked.append(block)
            if isinstance(block.content, list):
                marked += block.content
    for each in marked:
        if each.cache_control is not None and each.cache_control.ttl is not None:
            yield _LIFETIMES_S[each.cache_control.ttl]


def _system(system: str | list[Block] | None) -> str:
    """Return the system prompt without the block that Claude Code adds for Anthropic's billing.

    This block is at the beginning and contains a hash that differs between requests, which would prevent all prefix
    cache hits.
    """
    if system is None or isinstance(system, str):
        return system or ""
    return _text([block for block in system if not block.text.startswith(_BILLING)], "system")


def _is_callable(tool: MessagesTool, field: str) -> bool:
    """Return whether the model can call a tool, which is not the case for tools that run on Anthropic's servers."""
    if tool.type.startswith(_SERVER_TOOLS):
        return False
    if tool.input_schema is None and tool.type != "custom":
        what = f"{tool.type[:64]!r} is not supported, because its schema is not public; use a tool with input_schema"
        raise InvalidRequestError(FieldViolation(f"{field}.type", what))
    if not tool.name:
        raise InvalidRequestError(FieldViolation(f"{field}.name", "missing; it is required"))
    return True


def _messages(turn: Turn, field: str) -> Iterator[tuple[Json, str]]:
    """Yield one turn's messages, each with the path of its source in the request."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}, f"{field}.content"
        return
    texts: list[str] = []
    calls: list[Json] = []
    for number, block in enumerate(turn.content):
        match block.type:
            case "text":
                texts.append(block.text)
            case "tool_use":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                result = _text(block.content or "", f"{field}.content[{number}].content")
                name = f"{field}.content[{number}]"
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}, name
            case "thinking" | "redacted_thinking":
                pass  # Omit reasoning, because models are trained without the reasoning of earlier turns.
            case _:
                raise _unsupported(block, f"{field}.content[{number}]")
    if calls:
        yield {"role": turn.role, "content": "".join(texts) or None, "tool_calls": calls}, f"{field}.content"
    elif texts:
        yield {"role": turn.role, "content": "".join(texts)}, f"{field}.content"


def _text(content: str | list[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block, f"{field}[{number}]")
    return "".join(block.text for block in content)


def _unsupported(block: Block, field: str) -> InvalidRequestError:
    what = f"blocks of type {block.type[:64]!r} are not supported, because the server reads text only"
    return InvalidRequestError(FieldViolation(f"{field}.type", f"{what}; send text, tool_use and tool_result"))
