"""Builds request messages from the arguments of both clients. Pure functions.

If a field cannot hold its value (a negative count, invalid Unicode), the value is rejected here. The error names the
field, as an error from the server would.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from quire import errors
from quire._resume import make_resumable
from quire.types import GenerateOptions, Message, SchedulingOptions
from quire.v1 import generation_pb2 as pb

_POOLING = {"last": pb.POOLING_LAST, "mean": pb.POOLING_MEAN}
_TOOL_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
_TYPES = {
    FieldDescriptor.CPPTYPE_STRING: ("a string", "strings"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_BOOL: ("True or False", "booleans"),
}
"""Values that a field accepts, by field type, in singular and plural; fields of other types accept integers."""


def check_options(options: Mapping[str, object]) -> None:
    """Check the names of options for `generate`.

    Raises:
        TypeError: an option does not exist.
    """
    for name in options:
        if name not in GenerateOptions.__optional_keys__:
            raise TypeError(f"generate() got {unknown_option(name)}")


def unknown_option(name: str) -> str:
    """Describe an unknown option; suggest the closest name."""
    close = difflib.get_close_matches(name, GenerateOptions.__optional_keys__, n=1)
    return f"an unknown option {name!r}; " + (f"did you mean {close[0]!r}?" if close else "see quire.GenerateOptions")


def check_timeout(timeout: float | None) -> float | None:
    """Return a valid timeout.

    Raises:
        InvalidRequestError: the timeout is not a positive number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise invalid("timeout", f"{timeout!r} is not a positive number of seconds; None means no timeout")
    return timeout


def build_generate(
    prompt: str | None,
    *,
    messages: Sequence[Message] | None = None,
    token_ids: Sequence[int] | None = None,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    n: int | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] = (),
    banned_token_ids: Sequence[int] = (),
    bad_words: Sequence[str] = (),
    min_tokens: int | None = None,
    include_stop_string: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    echo: bool = False,
    truncate_prompt_tokens: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | None = None,
    parallel_tool_calls: bool = True,
    parse: bool | None = None,
    template_variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    json_schema: str | Mapping[str, Any] | bool | None = None,
    regex: str | None = None,
    ebnf: str | None = None,
    choice: Sequence[str] | None = None,
    include_special_tokens: bool = False,
    resumable: bool = False,
    request_id: str = "",
    scheduling: SchedulingOptions | None = None,
) -> pb.GenerateRequest:
    """Return the request message; `quire.types.GenerateOptions` documents the arguments.

    Raises:
        InvalidRequestError: there is no prompt or more than one, or a field cannot hold its value.
    """
    _exactly_one(text=prompt, messages=messages, token_ids=token_ids)
    request = pb.GenerateRequest()
    _set(request, "request_id", request_id)
    _set(request, "model", model)
    _set(request, "text", prompt)
    if messages is not None:
        _set_chat(request.chat, messages)
        _set(request.chat, "tools_json", _to_json("chat.tools_json", tools), "chat.")
        _set(
            request.chat,
            "template_variables_json",
            _to_json("chat.template_variables_json", template_variables),
            "chat.",
        )
        _set(request.chat, "continue_final_message", continue_final_message, "chat.")
        _set_tool_choice(request.chat, tool_choice, parallel_tool_calls)
    if token_ids is not None:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", token_ids, "token_ids.")
    sampling, stops, output = request.sampling, request.stop, request.output
    values = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "n": n,
        "typical_p": typical_p, "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    _set_all(sampling, values, "sampling.")
    _set_biases(sampling, logit_bias)
    _extend(sampling, "allowed_token_ids", allowed_token_ids, "sampling.")
    _extend(sampling, "banned_token_ids", banned_token_ids, "sampling.")
    _extend(sampling, "bad_words", bad_words, "sampling.")
    values = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "ignore_eos": ignore_eos,
        "include_stop_string": include_stop_string,
    }  # fmt: skip
    _set_all(stops, values, "stop.")
    _extend(stops, "stop_strings", [stop] if isinstance(stop, str) else stop, "stop.")
    _extend(stops, "stop_token_ids", stop_token_ids, "stop.")
    values = {
        "logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": echo,
        "truncate_prompt_tokens": truncate_prompt_tokens, "include_special_tokens": include_special_tokens,
    }  # fmt: skip
    _set_all(output, values, "output.")
    _set(output, "parse", messages is not None if parse is None else parse, "output.")
    _set_grammar(request, json_schema=json_schema, regex=regex, ebnf=ebnf, choice=choice)
    if scheduling is not None:
        _set_scheduling(request.scheduling, scheduling)
    if resumable:
        make_resumable(request)
    return request


def build_tokenize(
    text: str | None, messages: Sequence[Message] | None, *, model: str, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """Return the request message for text or a conversation.

    Raises:
        InvalidRequestError: neither or both are given, or a field cannot hold its value.
    """
    _exactly_one(text=text, messages=messages)
    request = pb.TokenizeRequest(omit_special_tokens=not add_special_tokens)
    _set(request, "model", model)
    _set(request, "text", text)
    if messages is not None:
        _set_chat(request.chat, messages)
    return request


def build_detokenize(token_ids: Sequence[int], *, model: str, include_special_tokens: bool) -> pb.DetokenizeRequest:
    """Return the request message.

    Raises:
        InvalidRequestError: a token id is out of range.
    """
    request = pb.DetokenizeRequest(include_special_tokens=include_special_tokens)
    _set(request, "model", model)
    _extend(request, "token_ids", token_ids)
    return request


def build_embed(
    inputs: Sequence[str | Sequence[int]],
    *,
    model: str,
    pooling: str,
    normalize: bool,
    truncate_prompt_tokens: int | None,
    scheduling: SchedulingOptions | None,
    request_id: str,
) -> pb.EmbedRequest:
    """Return the request message.

    Raises:
        InvalidRequestError: the pooling is unknown, or a field cannot hold its value.
    """
    if pooling not in _POOLING:
        raise invalid("pooling", f"unknown value {pooling!r}; use one of {', '.join(map(repr, _POOLING))}")
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise invalid("inputs", f"must be a list, not {type(inputs).__name__}; put a single text into a list as well")
    request = pb.EmbedRequest(pooling=_POOLING[pooling], omit_normalization=not normalize)
    _set(request, "model", model)
    _set(request, "request_id", request_id)
    _set(request, "truncate_prompt_tokens", truncate_prompt_tokens)
    for index, each in enumerate(inputs):
        added = request.inputs.add()
        if isinstance(each, str):
            _set(added, "text", each, f"inputs[{index}].")
        else:
            added.token_ids.SetInParent()
            _extend(added.token_ids, "ids", each, f"inputs[{index}].token_ids.")
    if scheduling is not None:
        _set_scheduling(request.scheduling, scheduling)
    return request


def _exactly_one(**inputs: object) -> None:
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "none of them is given"
        raise invalid("input", f"{what}; use exactly one of {', '.join(inputs)}")


def _set(message: Any, field: str, value: object, parent: str = "") -> None:
    """Set a field unless the value is its default."""
    if value is None or value is False or (value == "" and field != "text"):
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        expected = _TYPES.get(message.DESCRIPTOR.fields_by_name[field].cpp_type, ("an integer", ""))[0]
        raise invalid(parent + field, _wrong_value(value, error, expected)) from None


def _set_all(message: Any, values: Mapping[str, object], parent: str) -> None:
    """Set fields by name, as `_set` does."""
    for field, value in values.items():
        _set(message, field, value, parent)


def _extend(message: Any, field: str, values: Any, parent: str = "") -> None:
    """Append values to a repeated field. If there are no values, an absent sub-message stays absent."""
    if isinstance(values, list | tuple) and not values:
        return
    expected = f"a list of {_TYPES.get(message.DESCRIPTOR.fields_by_name[field].cpp_type, ('', 'integers'))[1]}"
    if isinstance(values, str | bytes):
        raise invalid(parent + field, f"must be {expected}, not {type(values).__name__}")
    try:
        getattr(message, field).extend(values)
    except (ValueError, TypeError) as error:
        raise invalid(parent + field, _wrong_value(values, error, expected)) from None


def _set_biases(sampling: pb.SamplingOptions, biases: Mapping[int, float] | None) -> None:
    if biases is None:
        return
    expected = "a dict of numbers by token id"
    if not isinstance(biases, Mapping):
        raise invalid("sampling.logit_bias", f"must be {expected}, not {type(biases).__name__}")
    try:
        if biases:
            sampling.logit_bias.update(biases)
    except (ValueError, TypeError) as error:
        raise invalid("sampling.logit_bias", _wrong_value(biases, error, expected)) from None


def _set_scheduling(message: pb.SchedulingOptions, options: SchedulingOptions) -> None:
    if not isinstance(options, SchedulingOptions):
        what = f"must be a SchedulingOptions, not {type(options).__name__}"
        raise invalid("scheduling", f"{what}; use quire.SchedulingOptions(priority=1), for example")
    plain = {
        "priority": options.priority or None,
        "tenant": options.tenant,
        "expected_output_tokens": options.expected_output_tokens,
        "cache_scope": options.cache_scope,
        "request_class": options.request_class,
        "session_id": options.session_id,
        "ends_session": options.ends_session,
        "retention_priority": options.retention_priority or None,
    }
    _set_all(message, plain, "scheduling.")
    times = {
        "ttft_target": options.ttft_target_s,
        "total_time_target": options.total_time_target_s,
        "retention": options.retention_s,
        "expected_pause": options.expected_pause_s,
    }
    for field, seconds in times.items():
        if seconds is not None:
            _set_duration(getattr(message, field), seconds, f"scheduling.{field}")


def _set_duration(duration: Duration, seconds: float, field: str) -> None:
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (ValueError, TypeError, OverflowError):
        raise invalid(field, f"{seconds!r} is not a valid number of seconds") from None
    duration.SetInParent()  # Send an explicit 0 s, which differs from an unset field. The server checks the value.


def _set_chat(chat: pb.ChatInput, messages: Sequence[Message]) -> None:
    chat.SetInParent()
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise invalid("chat.messages", f"must be a list of dicts, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise invalid(f"chat.messages[{index}]", f"must be a dict, not {type(message).__name__}")
        unknown = set(message) - {"role", "content", "name", "tool_calls", "tool_call_id"}
        if unknown or "role" not in message or not ("content" in message or "tool_calls" in message):
            what = "invalid keys; use 'role' and 'content' and, optionally, 'name', 'tool_calls' and 'tool_call_id'"
            raise invalid(f"chat.messages[{index}]", what)
        turn = chat.messages.add()
        for field in ("role", "content", "name", "tool_call_id"):
            _set(turn, field, message.get(field), f"chat.messages[{index}].")
        calls = f"chat.messages[{index}].tool_calls_json"
        _set(turn, "tool_calls_json", _to_json(calls, message.get("tool_calls")), f"chat.messages[{index}].")


def _set_tool_choice(chat: pb.ChatInput, choice: str | None, parallel: bool) -> None:
    if choice is not None and not isinstance(choice, str):
        what = f"must be a string, not {type(choice).__name__}"
        raise invalid("tool_choice", f"{what}; use 'auto', 'none', 'required' or the name of a function")
    if choice in _TOOL_MODES:
        chat.tool_choice.mode = _TOOL_MODES[choice]
    elif choice is not None:
        chat.tool_choice.mode = pb.TOOL_MODE_REQUIRED
        _set(chat.tool_choice, "name", choice, "chat.tool_choice.")
    if not parallel:
        chat.tool_choice.single = True


def _set_grammar(
    request: pb.GenerateRequest,
    *,
    json_schema: str | Mapping[str, Any] | bool | None,
    regex: str | None,
    ebnf: str | None,
    choice: Sequence[str] | None,
) -> None:
    given = {"json_schema": json_schema, "regex": regex, "ebnf": ebnf, "choice": choice}
    names = [name for name, value in given.items() if value is not None and value is not False]
    if len(names) > 1:
        raise invalid("grammar", f"several constraints are given; use at most one of {', '.join(given)}")
    if json_schema is True:
        request.grammar.json_object = True
    elif json_schema:
        text = json_schema if isinstance(json_schema, str) else _to_json("grammar.json_schema", json_schema)
        _set(request.grammar, "json_schema", text, "grammar.")
    elif choice is not None:
        request.grammar.choice.SetInParent()
        _extend(request.grammar.choice, "choices", choice, "grammar.choice.")
    for field, value in (("regex", regex), ("ebnf", ebnf)):
        if value is not None:
            _set(request.grammar, field, value, "grammar.")


def _to_json(field: str, value: object) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise invalid(field, "cannot be written as JSON; use dict, list, str, int, float, bool and None") from None


def _wrong_value(value: object, error: Exception, expected: str) -> str:
    """Describe why a field cannot hold a value, without quoting texts; `expected` describes valid values."""
    match error:
        case UnicodeEncodeError():
            return "not valid Unicode text; remove lone surrogates"
        case ValueError() if isinstance(value, int):
            return f"{value} is out of range"
        case ValueError():
            return "contains a value that is out of range"
    if isinstance(value, Sequence | Mapping) and expected.startswith(
        "a list" if isinstance(value, Sequence) else "a dict"
    ):
        return f"must be {expected}; one of its values is of another type"
    return f"must be {expected}, not {type(value).__name__}"


def invalid(field: str, description: str) -> errors.InvalidRequestError:
    """Return the error for an invalid field."""
    return errors.InvalidRequestError(
        f"{field}: {description}",
        code="INVALID_ARGUMENT",
        violations=[errors.FieldViolation(field, description)],
    )
