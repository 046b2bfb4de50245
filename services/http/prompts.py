"""Converts completion and chat requests to `GenerateRequest`."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.v1 import generation_pb2 as v1
from services.http.sampling import FieldNames, field_names, fill_common, fill_grammar
from services.http.schema import ChatBody, CompletionBody, JsonObject, Message, NamedTool, Tool
from services.http.tool_calls import forced_calls
from services.parsers import FAMILIES, Family, OutputParser, forced_json
from shared.errors import FieldViolation, InvalidRequestError

Prompt = str | list[int]
NewParser = Callable[[bool], OutputParser]
"""Makes a parser; the argument says whether the output begins within reasoning."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the generator."""

    request: v1.GenerateRequest
    names: FieldNames
    new_parser: NewParser | None = None
    """Makes the parser of a choice; None: all text is content."""


def prompts_of(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    """Return the list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [each for each in prompt if isinstance(each, int)]
    return [ids] if ids else [each for each in prompt if not isinstance(each, int)]


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
        # A request for the prompt's log-probabilities alone sets max_tokens to 0; one token is generated and not shown.
        request.stop.max_tokens = 1 if body.only_prompt else body.max_tokens
    if body.logprobs is not None:
        request.output.logprobs = body.logprobs
    if body.echo or body.return_token_ids:
        request.output.echo = True
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        # As in OpenAI's API, the echoed prompt has log-probabilities as well.
        request.output.prompt_logprobs = body.logprobs
    constraint = fill_grammar(request, body)
    return Prepared(
        request, field_names(dict.fromkeys(("text", "token_ids", "input"), "prompt") | _grammar(constraint))
    )


def prepare_chat(body: ChatBody, request_id: str, family: Family) -> Prepared:
    """Return the request for a conversation; `family` is how the model writes reasoning and tool calls.

    Raises:
        InvalidRequestError: fields contradict each other.
    """
    request = v1.GenerateRequest()
    fill_common(request, body, request_id)
    shown, forced = _choose_tools(body)
    fill_chat(request.chat, body.messages, shown, _variables(body))
    request.chat.omit_generation_prompt = not body.add_generation_prompt or body.continue_final_message
    request.chat.continue_final_message = body.continue_final_message
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequestError(
            FieldViolation(
                "max_tokens", "differs from max_completion_tokens; give one of them (max_tokens is the old name)"
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
    new_parser = _parser_of(family, shown, constrained=bool(constraint))
    if forced:
        if constraint:
            raise InvalidRequestError(
                FieldViolation("tool_choice", f"cannot be combined with {constraint}; remove one of them")
            )
        schema = forced_calls([tool.function for tool in forced], parallel=_parallel(body))
        request.grammar.json_schema = json.dumps(schema)
        constraint, new_parser = "tools", lambda _reasons: OutputParser(forced_json)
    elif shown and not family.calls_tools:
        raise InvalidRequestError(
            FieldViolation(
                "tools",
                "the served model's chat template does not support tools; set tool_choice to 'required' or to a"
                " named function",
            )
        )
    if family.has_special_markers and new_parser is not None and not forced:
        request.output.include_special_tokens = True
    names = field_names(
        {
            "chat.tools_json": "tools",
            "chat.template_variables_json": "chat_template_kwargs",
            "chat": "messages",
            "chat.messages": "messages",
            "input": "messages",
            "stop.max_tokens": max_tokens_field,
            "output.logprobs": "top_logprobs",
        }
        | _grammar(constraint)
    )
    return Prepared(request, names, new_parser)


def _parser_of(family: Family, tools: Sequence[Tool], *, constrained: bool) -> NewParser | None:
    """Return the factory of the parsers of a conversation's answer."""
    if constrained:
        return None  # the grammar leaves no room for markers
    read = family.read if tools else family.read_without_tools
    if read is FAMILIES["plain"].read:
        return None  # such outputs have no markers, and show no special tokens
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return lambda reasons: OutputParser(read, schemas=schemas, reasons=reasons)


def fill_chat(
    chat: v1.ChatInput, messages: Iterable[Message], tools: Sequence[Tool], variables: JsonObject | None
) -> None:
    """Write the messages, tools and template variables into `chat`.

    Raises:
        InvalidRequestError: a message has neither content nor tool calls.
    """
    for number, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            raise InvalidRequestError(
                FieldViolation(
                    f"messages[{number}].content", "missing; give a text (only a message with tool_calls needs none)"
                )
            )
        turn = chat.messages.add()
        # Templates know OpenAI's role developer as system.
        turn.role = "system" if message.role == "developer" else message.role
        turn.content = message.text
        turn.name = message.name or ""
        turn.tool_call_id = message.tool_call_id or ""
        if message.tool_calls:
            turn.tool_calls_json = json.dumps([call.model_dump() for call in message.tool_calls])
    if tools:
        chat.tools_json = json.dumps([tool.model_dump(exclude_none=True) for tool in tools])
    if variables:
        chat.template_variables_json = json.dumps(variables)


def _choose_tools(body: ChatBody) -> tuple[list[Tool], list[Tool]]:
    """Return the tools in the prompt, and the tools of which the model must call one."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequestError(
                FieldViolation("tool_choice", "requires tools; add tools or set tool_choice to 'none'")
            )
        return [], []
    if choice == "none":
        return [], []
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise InvalidRequestError(
                FieldViolation(
                    "tool_choice.function.name",
                    f"no tool is named {choice.function.name!r}; give the name of one of tools",
                )
            )
        return tools, named
    return tools, tools if choice == "required" else []


def _parallel(body: ChatBody) -> bool:
    return body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)


def _variables(body: ChatBody) -> JsonObject:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _grammar(constraint: str) -> dict[str, str]:
    kinds = ("json_schema", "regex", "ebnf", "choice", "choice.choices", "json_object", "whitespace")
    names = {f"grammar.{kind}": constraint for kind in kinds} | {"grammar": constraint}
    return names if constraint else {}
