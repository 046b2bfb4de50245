"""Converts completion and chat requests to `GenerateRequest`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from quire.v1 import generation_pb2 as v1
from services.http.sampling import field_names, fill_common, fill_grammar
from services.http.schema import AllowedToolsChoice, ChatBody, CompletionBody, JsonObject, Message, NamedTool, Tool
from services.http.turns import in_strict_order
from shared.errors import FieldViolation, InvalidRequestError

Prompt = str | list[int]
_MODES = {"none": v1.TOOL_MODE_NONE, "auto": v1.TOOL_MODE_AUTO, "required": v1.TOOL_MODE_REQUIRED}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the generator."""

    request: v1.GenerateRequest
    names: Callable[[str], str]
    """Returns the client's name of a field, by its path in the proto."""


def prompts_of(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    # Check only the first item, because all items of a parsed list have the same type and the list may have a million.
    return cast(list[Prompt], [prompt] if isinstance(prompt[0], int) else prompt)


def prepare_completion(body: CompletionBody, prompt: Prompt, request_id: str) -> Prepared:
    """Return the request for one prompt of a completion.

    Raises:
        InvalidRequestError: fields contradict each other.
    """
    if body.best_of not in (None, body.n):
        raise InvalidRequestError(FieldViolation("best_of", "not supported; generate n choices and rank them yourself"))
    request = v1.GenerateRequest()
    fill_common(request, body, request_id)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if body.max_tokens is not None:
        request.stop.max_tokens = body.max_tokens
    if body.logprobs is not None:
        request.output.logprobs = body.logprobs
    if body.echo or body.return_token_ids:
        request.output.echo = True
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        # As in OpenAI's API, the echoed prompt has log-probabilities too.
        request.output.prompt_logprobs = body.logprobs
    constraint = fill_grammar(request, body)
    return Prepared(
        request, field_names(dict.fromkeys(("text", "token_ids", "input"), "prompt") | _grammar(constraint))
    )


def prepare_chat(body: ChatBody, request_id: str, *, strict_order: bool) -> Prepared:
    """Return the request for a conversation.

    Args:
        body: the conversation and its options.
        request_id: the request's id.
        strict_order: put the messages into the order that strict templates accept.

    Raises:
        InvalidRequestError: fields contradict each other.
    """
    request = v1.GenerateRequest()
    fill_common(request, body, request_id)
    fill_chat(request.chat, body.messages, body.tools or (), _variables(body), strict_order=strict_order)
    _fill_choice(request.chat.tool_choice, body)
    request.chat.omit_generation_prompt = not body.add_generation_prompt or body.continue_final_message
    request.chat.continue_final_message = body.continue_final_message
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            FieldViolation(
                "max_tokens", "differs from max_completion_tokens; use one of them (max_tokens is the old name)"
            )
        )
    max_tokens_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is not None:
        request.stop.max_tokens = max_tokens
    if body.logprobs:
        request.output.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequestError(FieldViolation("top_logprobs", "requires logprobs; set logprobs to true"))
    if body.return_token_ids:
        request.output.echo = True
    constraint = fill_grammar(request, body)
    if constraint and request.chat.tool_choice.mode == v1.TOOL_MODE_REQUIRED:
        if constraint != "response_format":
            raise InvalidRequestError(
                FieldViolation("tool_choice", f"cannot be combined with {constraint}; remove one of them")
            )
        # As in OpenAI's API, the format applies only to text. A response with forced calls has no text.
        request.ClearField("grammar")
    request.output.parse = True
    names = field_names(
        {
            "chat.tools_json": "tools",
            "chat.tool_choice": "tool_choice",
            "chat.tool_choice.name": "tool_choice.function.name",
            "chat.tool_choice.allowed": "tool_choice.allowed_tools.tools",
            "chat.template_variables_json": "chat_template_kwargs",
            "chat": "messages",
            "chat.messages": "messages",
            "input": "messages",
            "stop.max_tokens": max_tokens_field,
            "output.logprobs": "top_logprobs",
        }
        | _grammar(constraint or ("tools" if body.tools else ""))
    )
    return Prepared(request, names)


def fill_chat(
    chat: v1.ChatInput,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    variables: JsonObject | None,
    *,
    strict_order: bool,
) -> None:
    """Write the messages, tools and template variables into `chat`.

    Args:
        chat: what to fill.
        messages: the messages.
        tools: the tools.
        variables: variables of the template.
        strict_order: put the messages into the order that strict templates accept.

    Raises:
        InvalidRequestError: a message has neither content nor tool calls.
    """
    for number, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            raise InvalidRequestError(
                FieldViolation(
                    f"messages[{number}].content", "missing; add a text (only a message with tool_calls needs none)"
                )
            )
    for message in in_strict_order(messages) if strict_order else messages:
        turn = chat.messages.add()
        # Chat templates use the name "system" for OpenAI's role "developer".
        turn.role = "system" if message.role == "developer" else message.role
        turn.content = message.text
        turn.name = message.name or ""
        turn.tool_call_id = message.tool_call_id or ""
        if message.tool_calls:
            turn.tool_calls_json = json.dumps([call.model_dump() for call in message.tool_calls])
    if tools:
        chat.tools_json = json.dumps([tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools])
    if variables:
        chat.template_variables_json = json.dumps(variables)


def _fill_choice(choice: v1.ToolChoice, body: ChatBody) -> None:
    match body.tool_choice:
        case NamedTool() as named:
            choice.mode, choice.name = v1.TOOL_MODE_REQUIRED, named.function.name
        case AllowedToolsChoice(allowed_tools=allowed):
            choice.mode = _MODES[allowed.mode]
            choice.allowed.extend(tool.function.name for tool in allowed.tools)
        case None:
            pass
        case mode:
            choice.mode = _MODES[mode]
    choice.single = not body.parallel_tool_calls


def _variables(body: ChatBody) -> JsonObject:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _grammar(constraint: str) -> dict[str, str]:
    kinds = ("json_schema", "regex", "ebnf", "choice", "choice.choices", "json_object", "whitespace")
    names = {f"grammar.{kind}": constraint for kind in kinds} | {"grammar": constraint}
    return names if constraint else {}
