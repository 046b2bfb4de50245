"""Is this request one that can run? Pure functions from the public message to a validated value or to an error.

All violations are reported together, each under the field's name in the proto. What can only be known once the prompt
is tokens (its length, what still fits) is checked by `fit`, everything else by `validate`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.chat import check_chat
from services.scheduling import check_scheduling
from shared.errors import FieldViolation, InvalidRequestError, UnsupportedFieldError
from shared.ids import draw_request_id, draw_seed

MAX_REQUEST_ID = 128
MAX_MODEL_NAME = 256
MAX_TEXT = 4 << 20
MAX_TOKEN_IDS = 1 << 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 100.0
MAX_CHOICES = 128
MAX_LOGPROBS = 20

Violations = Iterator[FieldViolation]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """What a request asks for, defaults filled in, all but its prompt."""

    request_id: str
    model: str
    sampling: plan_pb2.SamplingParams
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """The model's end-of-sequence tokens are in it unless the request ignores them."""
    max_tokens: int | None
    min_tokens: int
    include_stop_string: bool
    include_special_tokens: bool
    num_choices: int
    echo: bool
    truncate_prompt_tokens: int | None


def validate(request: v1.GenerateRequest, model: link_pb2.ServedModel, *, has_chat_template: bool) -> ValidRequest:
    """Checks everything that does not need the prompt's tokens.

    Raises:
        InvalidRequestError: names every wrong field.
        UnsupportedFieldError: a field that this version does not support is set.
    """
    violations = [
        *_check_request_id(request.request_id),
        *check_model(request.model, model),
        *_check_input(request, model, has_chat_template),
        *_check_sampling(request.sampling),
        *_check_stop(request.stop, model),
        *_check_output(request.output),
        *check_scheduling(request.scheduling),
    ]
    if violations:
        raise InvalidRequestError(*violations)
    _refuse_unsupported(request)
    sampling, stop, output = request.sampling, request.stop, request.output
    eos = () if stop.ignore_eos else tuple(model.eos_token_ids)
    return ValidRequest(
        request_id=request.request_id or draw_request_id(),
        model=model.name,
        sampling=plan_pb2.SamplingParams(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            min_p=sampling.min_p,
            seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
        ),
        stop_strings=tuple(dict.fromkeys(stop.stop_strings)),
        stop_token_ids=tuple(dict.fromkeys((*eos, *stop.stop_token_ids))),
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        min_tokens=stop.min_tokens,
        include_stop_string=stop.include_stop_string,
        include_special_tokens=output.include_special_tokens,
        num_choices=sampling.n if sampling.HasField("n") else 1,
        echo=output.echo,
        truncate_prompt_tokens=output.truncate_prompt_tokens if output.HasField("truncate_prompt_tokens") else None,
    )


def fit(num_prompt_tokens: int, max_tokens: int | None, default: int, model: link_pb2.ServedModel, field: str) -> int:
    """How many tokens a prompt of this length may generate; `field` is the name of the prompt's field.

    Raises:
        InvalidRequestError: an empty prompt, one that leaves no room, or more tokens wanted than fit.
    """
    room = model.max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequestError(FieldViolation(field, "the prompt is empty; it must hold at least one token"))
    if room < 1:
        raise InvalidRequestError(
            FieldViolation(
                field,
                f"{num_prompt_tokens} tokens; at most {model.max_model_len - 1} leave room for an answer",
            )
        )
    if max_tokens is None:
        return min(default, room)
    if max_tokens > room:
        raise InvalidRequestError(
            FieldViolation(
                "stop.max_tokens",
                f"{max_tokens} with a prompt of {num_prompt_tokens} tokens exceeds the context of"
                f" {model.max_model_len}; at most {room} fit",
            )
        )
    return max_tokens


def check_model(name: str, model: link_pb2.ServedModel) -> Violations:
    """The name is empty or the served model's."""
    if len(name.encode()) > MAX_MODEL_NAME:
        yield FieldViolation("model", f"longer than {MAX_MODEL_NAME} bytes")
    elif name not in ("", model.name):
        yield FieldViolation("model", f"no such model; this server serves {model.name!r}")


def check_text(text: str, field: str, *, may_be_empty: bool = False) -> Violations:
    """Plain text for the tokenizer."""
    if not (text or may_be_empty):
        yield FieldViolation(field, "the prompt is empty; it must hold at least one token")
    elif len(text.encode()) > MAX_TEXT:
        yield FieldViolation(field, f"longer than {MAX_TEXT} bytes")


def check_token_ids(ids: "list[int]", vocab_size: int, field: str, limit: int = MAX_TOKEN_IDS) -> Violations:
    """Ids of the vocabulary."""
    if len(ids) > limit:
        yield FieldViolation(field, f"{len(ids)} ids; at most {limit} are allowed")
    elif ids and max(ids) >= vocab_size:
        position = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        yield FieldViolation(field, f"id {ids[position]} at position {position} is outside [0, {vocab_size})")


def _check_request_id(request_id: str) -> Violations:
    if len(request_id) > MAX_REQUEST_ID:
        yield FieldViolation("request_id", f"longer than {MAX_REQUEST_ID} bytes")
    elif not (request_id.isascii() and request_id.isprintable()):
        yield FieldViolation("request_id", "must be printable ASCII")


def _check_input(request: v1.GenerateRequest, model: link_pb2.ServedModel, has_chat_template: bool) -> Violations:
    match request.WhichOneof("input"):
        case "text":
            yield from check_text(request.text, "text")
        case "chat":
            yield from check_chat(request.chat, has_chat_template)
        case "token_ids":
            ids = list(request.token_ids.ids)
            if not ids:
                yield FieldViolation("token_ids", "the prompt is empty; it must hold at least one token")
            yield from check_token_ids(ids, model.vocab_size, "token_ids")
        case _:
            yield FieldViolation("input", "missing; give one of `text`, `chat` and `token_ids`")


def _check_sampling(sampling: v1.SamplingOptions) -> Violations:
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:  # false for NaN
        yield FieldViolation("sampling.temperature", f"must lie in [0, {MAX_TEMPERATURE:g}]")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield FieldViolation("sampling.top_p", "must lie in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        yield FieldViolation("sampling.min_p", "must lie in [0, 1]")
    if sampling.top_k > 0x7FFFFFFF:
        yield FieldViolation("sampling.top_k", f"must lie in [0, {0x7FFFFFFF}]")
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_CHOICES:
        yield FieldViolation("sampling.n", f"must lie in [1, {MAX_CHOICES}]")
    for name in ("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            yield FieldViolation(f"sampling.{name}", "must be a finite number")


def _check_stop(stop: v1.StopOptions, model: link_pb2.ServedModel) -> Violations:
    if stop.HasField("max_tokens") and not 1 <= stop.max_tokens < model.max_model_len:
        yield FieldViolation("stop.max_tokens", f"must lie in [1, {model.max_model_len - 1}]")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        yield FieldViolation("stop.stop_strings", f"more than {MAX_STOP_STRINGS} strings")
    for index, stop_string in enumerate(stop.stop_strings[:MAX_STOP_STRINGS]):
        if not 0 < len(stop_string.encode()) <= MAX_STOP_STRING:
            yield FieldViolation(f"stop.stop_strings[{index}]", f"must have 1 to {MAX_STOP_STRING} bytes")
    yield from check_token_ids(list(stop.stop_token_ids), model.vocab_size, "stop.stop_token_ids", MAX_STOP_TOKEN_IDS)


def _check_output(output: v1.OutputOptions) -> Violations:
    if output.HasField("truncate_prompt_tokens") and not 0 < output.truncate_prompt_tokens <= MAX_TOKEN_IDS:
        yield FieldViolation("output.truncate_prompt_tokens", f"must lie in [1, {MAX_TOKEN_IDS}]")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(output, name) > MAX_LOGPROBS:
            yield FieldViolation(f"output.{name}", f"must lie in [0, {MAX_LOGPROBS}]")


def _refuse_unsupported(request: v1.GenerateRequest) -> None:
    sampling, stop, output = request.sampling, request.stop, request.output
    is_set = {
        "grammar": request.HasField("grammar"),
        "resumable": request.resumable,
        "adapter": bool(request.adapter),
        "sampling.typical_p": sampling.HasField("typical_p") and sampling.typical_p != 1,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.allowed_token_ids": bool(sampling.allowed_token_ids),
        "sampling.banned_token_ids": bool(sampling.banned_token_ids),
        "sampling.bad_words": bool(sampling.bad_words),
        "stop.min_tokens": stop.min_tokens > 0,
        "output.logprobs": output.HasField("logprobs"),
        "output.prompt_logprobs": output.HasField("prompt_logprobs"),
    }
    for field, present in is_set.items():
        if present:
            raise UnsupportedFieldError(field)
