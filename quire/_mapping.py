"""What both clients share: building request messages, reading response messages, turning a failed call into
an error.

Pure functions, no connection. A value that does not fit its field (a negative count, text that is not
Unicode) is refused here with the field's name, as the server would do it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire import errors
from quire._resume import make_resumable
from quire.types import (
    Choice,
    ChoiceFinished,
    Completion,
    Delta,
    Finished,
    FinishReason,
    Message,
    Model,
    Prompt,
    SchedulingOptions,
    ScoredToken,
    Timings,
    Tokenized,
    TokenLogprobs,
    Usage,
)
from quire.v1 import generation_pb2 as pb
from quire.v1 import model_pb2

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A detokenized million tokens is more than gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    # Otherwise all clients of a process share one connection, and with it one front end.
    ("grpc.use_local_subchannel_pool", 1),
    # A server that is started again is found soon; gRPC would wait for up to two minutes between two attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

_STATUS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_PROPAGATOR = TraceContextTextMapPropagator()
_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class FailedCall(Protocol):
    """What grpc's and grpc.aio's errors have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def call_metadata(token: str = "") -> tuple[tuple[str, str], ...]:
    """The current OpenTelemetry context, if something is being traced, and who calls, as call metadata."""
    carrier: dict[str, str] = {"authorization": f"Bearer {token}"} if token else {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


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
    """The request message; `quire.types.GenerateOptions` documents the arguments.

    Raises:
        InvalidRequestError: no prompt or several, or a value that its field cannot hold.
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
    if token_ids is not None:
        request.token_ids.SetInParent()
        _extend("token_ids.ids", request.token_ids.ids.extend, token_ids)
    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "n": n,
        "typical_p": typical_p, "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    for field, value in sampling.items():
        _set(request.sampling, field, value, "sampling.")
    _set(request.stop, "max_tokens", max_tokens, "stop.")
    _extend("stop.stop_strings", request.stop.stop_strings.extend, [stop] if isinstance(stop, str) else stop)
    _extend("stop.stop_token_ids", request.stop.stop_token_ids.extend, stop_token_ids)
    _set(request.stop, "ignore_eos", ignore_eos, "stop.")
    _extend("sampling.logit_bias", request.sampling.logit_bias.update, logit_bias or {})
    for field, values in (
        ("allowed_token_ids", allowed_token_ids), ("banned_token_ids", banned_token_ids), ("bad_words", bad_words),
    ):  # fmt: skip
        _extend(f"sampling.{field}", getattr(request.sampling, field).extend, values)
    _set(request.stop, "min_tokens", min_tokens, "stop.")
    _set(request.stop, "include_stop_string", include_stop_string, "stop.")
    output = {
        "logprobs": logprobs, "prompt_logprobs": prompt_logprobs, "echo": echo,
        "truncate_prompt_tokens": truncate_prompt_tokens,
    }  # fmt: skip
    for field, value in output.items():
        _set(request.output, field, value, "output.")
    _set_grammar(request, json_schema=json_schema, regex=regex, ebnf=ebnf, choice=choice)
    _set(request.output, "include_special_tokens", include_special_tokens, "output.")
    if scheduling is not None:
        _set_scheduling(request.scheduling, scheduling)
    if resumable:
        make_resumable(request)
    return request


def build_tokenize(
    text: str | None, messages: Sequence[Message] | None, *, model: str, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """The request message for text or a conversation.

    Raises:
        InvalidRequestError: neither or both are given, or a value that its field cannot hold.
    """
    _exactly_one(text=text, messages=messages)
    request = pb.TokenizeRequest(omit_special_tokens=not add_special_tokens)
    _set(request, "model", model)
    _set(request, "text", text)
    if messages is not None:
        _set_chat(request.chat, messages)
    return request


def build_detokenize(token_ids: Sequence[int], *, model: str, include_special_tokens: bool) -> pb.DetokenizeRequest:
    """The request message.

    Raises:
        InvalidRequestError: an id that no token can have.
    """
    request = pb.DetokenizeRequest(include_special_tokens=include_special_tokens)
    _set(request, "model", model)
    _extend("token_ids", request.token_ids.extend, token_ids)
    return request


def read_delta(delta: pb.Delta) -> Delta:
    """A delta as the client gives it."""
    logprobs = read_logprobs(delta.logprobs) if delta.logprobs else ()
    return Delta(delta.choice, delta.first_index, tuple(delta.token_ids), delta.text, logprobs)


def read_logprobs(entries: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities, position by position."""
    return tuple(TokenLogprobs(_read_scored(entry.token), tuple(map(_read_scored, entry.top))) for entry in entries)


def read_prompt(prompt: pb.Prompt) -> Prompt:
    """The prompt as the model saw it."""
    return Prompt(tuple(prompt.token_ids), prompt.text, read_logprobs(prompt.logprobs))


def read_choice_finished(finished: pb.ChoiceFinished) -> ChoiceFinished:
    """The end of one of several answers.

    Raises:
        ServerError: a reason that this API does not know.
    """
    stop = finished.WhichOneof("stop")
    return ChoiceFinished(
        choice=finished.choice,
        reason=_read_reason(finished.reason),
        stop_string=finished.stop_string if stop == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stop == "stop_token_id" else None,
        completion_tokens=finished.completion_tokens,
    )


def _read_scored(token: pb.ScoredToken) -> ScoredToken:
    return ScoredToken(token.token_id, token.logprob, token.rank, token.bytes)


def _read_reason(reason: pb.FinishReason.ValueType) -> FinishReason:
    if reason not in _REASONS:
        raise errors.ServerError(f"the server ended with an unknown reason ({reason})")
    return _REASONS[reason]


def read_finished(finished: pb.Finished) -> Finished:
    """The end of a generation.

    Raises:
        ServerError: a reason that this API does not know.
    """
    stop = finished.WhichOneof("stop")
    return Finished(
        reason=_read_reason(finished.reason),
        stop_string=finished.stop_string if stop == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stop == "stop_token_id" else None,
        usage=Usage(
            finished.usage.prompt_tokens,
            finished.usage.completion_tokens,
            finished.usage.cached_prompt_tokens,
            finished.usage.preemptions,
        ),
        timings=Timings(
            _seconds(finished.timings.queued),
            _seconds(finished.timings.first_token),
            _seconds(finished.timings.total),
        ),
        request_id=finished.request_id,
        model=finished.model,
    )


def read_tokenized(response: pb.TokenizeResponse) -> Tokenized:
    """The tokens of a prompt."""
    return Tokenized(tuple(response.token_ids), response.max_model_len)


def read_model(model: model_pb2.Model) -> Model:
    """A served model."""
    return Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        dtype=model.dtype,
        has_chat_template=model.has_chat_template,
        fingerprint=model.fingerprint,
    )


class Events:
    """What a stream of events has said so far; shared by both clients."""

    def __init__(self) -> None:
        self.finished: Finished | None = None
        self.prompt: Prompt | None = None
        self.choices: dict[int, ChoiceFinished] = {}

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """Takes the next message; returns its delta, if it is one.

        Raises:
            ServerError: a reason that this API does not know.
        """
        match response.WhichOneof("event"):
            case "delta":
                return read_delta(response.delta)
            case "prompt":
                self.prompt = read_prompt(response.prompt)
            case "choice_finished":
                finished = read_choice_finished(response.choice_finished)
                self.choices[finished.choice] = finished
            case "finished":
                self.finished = read_finished(response.finished)
        return None

    def join(self, deltas: Sequence[Delta]) -> Completion:
        """A whole answer from its parts.

        Raises:
            ServerError: the stream ended without saying how.
        """
        finished = require_finished(self.finished)
        ends = self.choices or {
            0: ChoiceFinished(
                0, finished.reason, finished.stop_string, finished.stop_token_id, finished.usage.completion_tokens
            )
        }
        choices = tuple(_choice([d for d in deltas if d.choice == index], ends[index]) for index in sorted(ends))
        first = choices[0]
        return Completion(first.text, first.token_ids, finished, first.logprobs, choices, self.prompt)


def _choice(deltas: Sequence[Delta], finished: ChoiceFinished) -> Choice:
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finished=finished,
    )


def require_finished(finished: Finished | None) -> Finished:
    """The end of a generation whose stream is over.

    Raises:
        ServerError: the stream ended without saying how.
    """
    if finished is None:
        raise errors.ServerError("the stream ended without a final message")
    return finished


def read_batch_error(error: pb.Error) -> errors.QuireError:
    """The typed error of one request of a batch."""
    return errors.class_for(error.code, error.reason)(
        error.message or error.code,
        code=error.code,
        reason=error.reason,
        retry_after_s=_seconds(error.retry_after) if error.HasField("retry_after") else None,
        violations=[errors.FieldViolation(v.field, v.description) for v in error.violations],
    )


def read_error(call: FailedCall) -> errors.QuireError:
    """The typed error of a failed call. Details that cannot be read are left out, never raised."""
    code = call.code().name
    trailers = _text_and_bytes(call.trailing_metadata())
    status = _parse(status_pb2.Status, trailers.get(_STATUS_KEY))
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    retry_after_s = _pushback(trailers.get(_PUSHBACK_KEY))
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = _seconds(retry.retry_delay)
    reason = info.reason if info.domain == errors.DOMAIN else ""
    return errors.class_for(code, reason)(
        status.message or call.details() or code,
        code=code,
        reason=reason,
        retry_after_s=retry_after_s,
        violations=[errors.FieldViolation(v.field, v.description) for v in bad_request.field_violations],
        metadata=info.metadata,
    )


def _exactly_one(**inputs: object) -> None:
    given = [name for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "none is given"
        raise _invalid("input", f"give exactly one of {', '.join(inputs)}; {what}")


def _set(message: Any, field: str, value: object, parent: str = "") -> None:
    """Sets a field unless the value is the one that an absent field stands for."""
    if value is None or value is False or (value == "" and field != "text"):
        return
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise _invalid(parent + field, str(error)) from None


def _extend(field: str, extend: Callable[[Any], object], values: Collection[object]) -> None:
    if not values:
        return  # touching a sub-message's list would already make the sub-message present
    try:
        extend(values)
    except (ValueError, TypeError) as error:
        raise _invalid(field, str(error)) from None


def _set_scheduling(message: pb.SchedulingOptions, options: SchedulingOptions) -> None:
    plain = {
        "priority": options.priority or None,
        "tenant": options.tenant,
        "expected_output_tokens": options.expected_output_tokens,
        "cache_scope": options.cache_scope,
        "request_class": options.request_class,
    }
    for field, value in plain.items():
        _set(message, field, value, "scheduling.")
    targets = {"ttft_target": options.ttft_target_s, "total_time_target": options.total_time_target_s}
    for field, seconds in targets.items():
        if seconds is not None:
            _set_duration(getattr(message, field), seconds, f"scheduling.{field}")


def _set_duration(duration: Duration, seconds: float, field: str) -> None:
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (ValueError, TypeError, OverflowError):
        raise _invalid(field, f"{seconds!r} is no number of seconds that a duration can hold") from None
    duration.SetInParent()  # 0 s is the server's to judge, not the same as none


def _set_chat(chat: pb.ChatInput, messages: Sequence[Message]) -> None:
    chat.SetInParent()
    for index, message in enumerate(messages):
        unknown = set(message) - {"role", "content", "name", "tool_calls", "tool_call_id"}
        if unknown or "role" not in message or not ("content" in message or "tool_calls" in message):
            what = "give a 'role' and a 'content', maybe 'name', 'tool_calls' and 'tool_call_id', nothing else"
            raise _invalid(f"chat.messages[{index}]", what)
        turn = chat.messages.add()
        for field in ("role", "content", "name", "tool_call_id"):
            _set(turn, field, message.get(field), f"chat.messages[{index}].")
        calls = f"chat.messages[{index}].tool_calls_json"
        _set(turn, "tool_calls_json", _to_json(calls, message.get("tool_calls")), f"chat.messages[{index}].")


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
        raise _invalid("grammar", f"give at most one of {', '.join(given)}")
    if json_schema is True:
        request.grammar.json_object = True
    elif json_schema:
        text = json_schema if isinstance(json_schema, str) else _to_json("grammar.json_schema", json_schema)
        _set(request.grammar, "json_schema", text, "grammar.")
    elif choice is not None:
        request.grammar.choice.SetInParent()
        _extend("grammar.choice.choices", request.grammar.choice.choices.extend, choice)
    for field, value in (("regex", regex), ("ebnf", ebnf)):
        if value is not None:
            _set(request.grammar, field, value, "grammar.")


def _to_json(field: str, value: object) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _invalid(field, str(error)) from None


def _invalid(field: str, description: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError(
        f"{field}: {description}",
        code="INVALID_ARGUMENT",
        violations=[errors.FieldViolation(field, description)],
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _text_and_bytes(metadata: Any) -> Mapping[str, str | bytes]:
    return dict(metadata or ())


def _parse(kind: type[status_pb2.Status], data: str | bytes | None) -> status_pb2.Status:
    status = kind()
    if isinstance(data, bytes):
        try:
            status.ParseFromString(data)
        except Exception:  # protobuf's DecodeError; a damaged detail must not hide the error itself
            return kind()
    return status


def _pushback(value: str | bytes | None) -> float | None:
    """gRPC's own hint, in milliseconds; negative means do not retry."""
    try:
        milliseconds = int(value) if value is not None else -1
    except ValueError:
        return None
    return milliseconds / 1000 if milliseconds >= 0 else None
