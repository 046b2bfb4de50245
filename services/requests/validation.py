"""Request validation: pure functions from the public message to a validated value or an error.

All violations are reported together, each under its proto field name. `validate` checks everything that does not depend
on the prompt's tokens; `resolve_max_tokens` checks the prompt's length.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.grammars.checker import check_grammar
from services.parsers import ModelFormat
from services.requests.output import OutputRules, output_rules
from services.requests.scheduling import check_scheduling
from services.requests.tools import Tools, read_tools, shown_tokens
from services.text.chat import check_chat
from shared.columns import to_column
from shared.errors import (
    ContextLengthError,
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFieldError,
)
from shared.frames import MAX_LOGPROBS, MAX_PART_BYTES, MAX_SERVED_SEQUENCE, TOKEN_BYTES
from shared.ids import draw_request_id, draw_seed
from shared.request_spec import RequestSpec

MAX_REQUEST_ID = 128
"""Maximum length of a request id, bytes."""
MAX_TEXT = 4 << 20
"""Maximum length of a text prompt, bytes."""
MAX_TOKEN_IDS = MAX_SERVED_SEQUENCE
MAX_STOP_STRINGS = 16
"""Maximum number of stop strings."""
MAX_STOP_STRING = 256
"""Maximum length of a stop string, bytes."""
MAX_STOP_TOKEN_IDS = 64
"""Maximum number of stop tokens."""
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-6
"""Temperatures below this are greedy. Noise cannot change the order of two different float32 logits, and the division
would overflow.
"""
MAX_CHOICES = 128
"""Maximum number of choices of a request."""
MIN_REPETITION_PENALTY = 0.001
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
"""Logit biases lie in [-MAX_BIAS, MAX_BIAS]."""
MAX_BIASES = 4096
"""Maximum number of logit biases."""
MAX_TOKEN_SET = 1 << 18
"""Maximum number of allowed or banned tokens."""
MAX_BAD_WORDS = 64
"""Maximum number of bad words."""
MAX_BAD_WORD = 256
"""Maximum length of a bad word, bytes."""

_SHOWN_NAME = 64
"""Maximum number of characters shown from an unknown model name in an error."""
_LOG_OVERHEAD = 4096
"""Maximum size of a request's log in addition to its long fields, bytes."""
_SCORES_OVERHEAD = 40
"""Maximum size of one token's log-probabilities in a log in addition to their values, bytes."""

Violations = Iterator[FieldViolation]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A validated request with defaults filled in, without its prompt."""

    request_id: str
    model: str
    sampling: plan_pb2.SamplingParams
    """Sampling parameters without bad words, which are not tokenised yet."""
    bad_words: tuple[str, ...]
    output: OutputRules
    tools: Tools
    stop_token_ids: tuple[int, ...]
    """Stop tokens, including the model's end-of-sequence tokens unless the request ignores them."""
    max_tokens: int | None
    only_prompt: bool
    """Whether the generated token is not sent."""
    num_choices: int
    resumable: bool
    echo: bool
    prompt_logprobs: bool
    truncate_prompt_tokens: int | None


def validate(
    request: v1.GenerateRequest, model: link_pb2.ServedModel, model_format: ModelFormat, *, has_chat_template: bool
) -> ValidRequest:
    """Check everything that does not need the prompt's tokens.

    Raises:
        ModelNotFoundError: the request names another model.
        InvalidRequestError: lists every invalid field.
        UnsupportedFieldError: a field is set that this version does not support.
    """
    check_model(request.model, model)
    violations = [
        *check_request_id(request.request_id),
        *_check_input(request, model, has_chat_template),
        *check_sampling_ranges(request.sampling),
        *_check_token_sets(request.sampling, model),
        *_check_stop(request, model),
        *_check_output(request.output),
        *check_grammar(request),
        *_check_resumable(request),
        *check_scheduling(request.scheduling),
    ]
    if violations:
        raise InvalidRequestError(*violations)
    _reject_unsupported(request)
    tools = read_tools(request, model_format)
    has_grammar = tools.has_grammar or request.HasField("grammar")
    sampling, stop, output = request.sampling, request.stop, request.output
    # A grammar allows the model's end-of-sequence token exactly where the output may end.
    eos = () if stop.ignore_eos and not has_grammar else tuple(model.eos_token_ids)
    stop_token_ids = tuple(dict.fromkeys((*eos, *stop.stop_token_ids)))
    if stop.min_tokens and not _can_sample(sampling, stop_token_ids, model):
        raise InvalidRequestError(
            FieldViolation(
                "stop.min_tokens",
                "the stop tokens are forbidden until min_tokens is reached, and no other token is allowed;"
                " allow more token ids or set min_tokens to 0",
            )
        )
    return ValidRequest(
        request_id=request.request_id or draw_request_id(),
        model=model.name,
        sampling=_sampling_params(request, stop_token_ids, has_grammar=has_grammar),
        bad_words=tuple(dict.fromkeys(sampling.bad_words)),
        output=output_rules(request, shown_tokens(request, tools, model_format)),
        tools=tools,
        stop_token_ids=stop_token_ids,
        # The core always generates at least one token.
        max_tokens=max(stop.max_tokens, 1) if stop.HasField("max_tokens") else None,
        only_prompt=scores_prompt(request),
        num_choices=sampling.n if sampling.HasField("n") else 1,
        resumable=request.resumable,
        echo=output.echo,
        prompt_logprobs=output.HasField("prompt_logprobs"),
        truncate_prompt_tokens=output.truncate_prompt_tokens if output.HasField("truncate_prompt_tokens") else None,
    )


def resolve_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, default: int, model: link_pb2.ServedModel, field: str
) -> int:
    """Return how many tokens may be generated after a prompt of this length.

    Args:
        num_prompt_tokens: length of the prompt.
        max_tokens: requested maximum; None if not set.
        default: limit for requests without one; 0 for the rest of the context.
        model: the served model.
        field: name of the prompt's field, for errors.

    Raises:
        InvalidRequestError: the prompt is empty or too long, or `max_tokens` does not fit.
    """
    room = model.max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequestError(FieldViolation(field, "the prompt is empty; use at least one token"))
    if room < 1:
        raise ContextLengthError(
            FieldViolation(
                field,
                # LangChain detects "prompt is too long", and litellm detects "this model's maximum context length is".
                f"the prompt is too long: this model's maximum context length is {model.max_model_len} tokens, and the"
                f" prompt has {num_prompt_tokens}; use at most {model.max_model_len - 1}",
            )
        )
    if max_tokens is None:
        return min(default or room, room)
    if max_tokens > room:
        raise ContextLengthError(
            FieldViolation(
                "stop.max_tokens",
                f"{max_tokens} is too large: this model's maximum context length is {model.max_model_len} tokens, and"
                f" the prompt has {num_prompt_tokens}; use at most {room}",
            )
        )
    return max_tokens


def check_num_requests(num_choices: int, limit: int, *, num_prompts: int = 1) -> None:
    """Check that a call's requests, one per choice and prompt, fit into the queue together.

    Args:
        num_choices: choices of each prompt.
        limit: maximum number of requests per call.
        num_prompts: prompts of the call.

    Raises:
        InvalidRequestError: the scheduler could never accept all of them.
    """
    if num_choices * num_prompts <= limit:
        return
    room = f"but at most {limit} requests of a tenant can wait (max_queued_requests)"
    if num_choices == 1:
        raise InvalidRequestError(FieldViolation("input", f"{num_prompts} prompts, {room}; use several calls"))
    prompts = "" if num_prompts == 1 else f" for each of {num_prompts} prompts"
    what = f"{num_choices} choices{prompts}, {room}; use fewer choices, or several calls"
    raise InvalidRequestError(FieldViolation("sampling.n", what))


def check_num_tokens(num_choices: int, num_prompt_tokens: int, limit: int) -> None:
    """Check that a prompt's choices fit into the queue together; `limit` is the maximum number of prompt tokens.

    Raises:
        InvalidRequestError: the scheduler could never accept all of them.
    """
    if num_choices > 1 and num_choices * num_prompt_tokens > limit:
        what = f"{num_choices} choices of a prompt with {num_prompt_tokens} tokens"
        room = f"but at most {limit} tokens of a tenant can wait (max_queued_tokens)"
        raise InvalidRequestError(FieldViolation("sampling.n", f"{what}, {room}; use fewer choices, or several calls"))


def check_log_size(valid: ValidRequest, spec: RequestSpec) -> None:
    """Check that a resumable request's log, including all log-probabilities, fits into a frame on the link.

    Raises:
        InvalidRequestError: it may not fit.
    """
    if not (valid.resumable and valid.output.logprobs):
        return
    per_token = TOKEN_BYTES + max_scores_bytes(valid.sampling.logprobs)
    max_tokens = spec.max_tokens
    opaque_bytes = len(spec.sampling) + len(spec.grammar) + len(spec.resume_info)
    room = MAX_PART_BYTES - _LOG_OVERHEAD - opaque_bytes - TOKEN_BYTES * spec.num_prompt_tokens
    if max_tokens * per_token > room:
        raise InvalidRequestError(
            FieldViolation(
                "output.logprobs",
                f"{valid.sampling.logprobs} for each of {max_tokens} tokens exceed the log of a resumable request,"
                f" which holds at most {room // per_token} such tokens; lower stop.max_tokens or output.logprobs, or"
                " unset resumable",
            )
        )


def max_scores_bytes(count: int) -> int:
    """Return the maximum size in a log of one token's log-probabilities with `count` most likely tokens, bytes."""
    return _SCORES_OVERHEAD + 2 * TOKEN_BYTES * (1 + count)


def check_model(name: str, model: link_pb2.ServedModel) -> None:
    """Check that the name is empty or equals the served model's name.

    Raises:
        ModelNotFoundError: it is another model's.
    """
    if name not in ("", model.name):
        raise ModelNotFoundError(f"model: {name[:_SHOWN_NAME]!r} does not exist; use {model.name!r}")


def check_text(text: str, field: str, *, may_be_empty: bool = False) -> Violations:
    """Check plain text for the tokenizer."""
    if not (text or may_be_empty):
        yield FieldViolation(field, "the prompt is empty; use at least one token")
    elif len(text.encode()) > MAX_TEXT:
        yield FieldViolation(field, f"too long; use at most {MAX_TEXT} bytes")


def check_token_ids(ids: Collection[int], vocab_size: int, field: str, limit: int = MAX_TOKEN_IDS) -> Violations:
    """Check that the ids are in the vocabulary and not too many."""
    if len(ids) > limit:
        yield FieldViolation(field, f"too many ids ({len(ids)}); use at most {limit}")
    elif ids and max(ids) >= vocab_size:
        position, wrong = next((i, token_id) for i, token_id in enumerate(ids) if token_id >= vocab_size)
        yield FieldViolation(field, f"id {wrong} at position {position} is outside [0, {vocab_size})")


def check_request_id(request_id: str) -> Violations:
    """Check the id that the client has chosen; empty for none."""
    if len(request_id) > MAX_REQUEST_ID:
        yield FieldViolation("request_id", f"too long; use at most {MAX_REQUEST_ID} bytes")
    elif not (request_id.isascii() and request_id.isprintable()):
        yield FieldViolation("request_id", "must be printable ASCII")


def check_truncation(count: int, field: str) -> Violations:
    """Check the number of tokens to keep."""
    if not 0 < count <= MAX_TOKEN_IDS:
        yield FieldViolation(field, f"must lie in [1, {MAX_TOKEN_IDS}]")


def _check_input(request: v1.GenerateRequest, model: link_pb2.ServedModel, has_chat_template: bool) -> Violations:
    match request.WhichOneof("input"):
        case "text":
            yield from check_text(request.text, "text")
        case "chat":
            yield from check_chat(request.chat, has_chat_template)
        case "token_ids":
            ids = request.token_ids.ids
            if not ids:
                yield FieldViolation("token_ids", "the prompt is empty; use at least one token")
            yield from check_token_ids(ids, model.vocab_size, "token_ids")
        case _:
            yield FieldViolation("input", "missing; add exactly one of `text`, `chat` and `token_ids`")


def check_sampling_ranges(sampling: v1.SamplingOptions) -> Violations:
    if not 0 <= sampling.temperature <= MAX_TEMPERATURE:  # The comparison is false for NaN.
        yield FieldViolation("sampling.temperature", f"must lie in [0, {MAX_TEMPERATURE:g}]")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        yield FieldViolation("sampling.top_p", "must lie in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        yield FieldViolation("sampling.min_p", "must lie in [0, 1]")
    if sampling.top_k > 0x7FFFFFFF:
        yield FieldViolation("sampling.top_k", f"must lie in [0, {0x7FFFFFFF}]")
    if sampling.HasField("n") and not 1 <= sampling.n <= MAX_CHOICES:
        yield FieldViolation("sampling.n", f"must lie in [1, {MAX_CHOICES}]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            yield FieldViolation(f"sampling.{name}", "must lie in [-2, 2]")
    if sampling.HasField("typical_p") and not 0 < sampling.typical_p <= 1:
        yield FieldViolation("sampling.typical_p", "must lie in (0, 1]")
    penalty = sampling.repetition_penalty
    if sampling.HasField("repetition_penalty") and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        bounds = f"[{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
        yield FieldViolation("sampling.repetition_penalty", f"must lie in {bounds}")


def _check_token_sets(sampling: v1.SamplingOptions, model: link_pb2.ServedModel) -> Violations:
    bias = sampling.logit_bias
    yield from check_token_ids(list(bias), model.vocab_size, "sampling.logit_bias", MAX_BIASES)
    if not all(-MAX_BIAS <= value <= MAX_BIAS for value in bias.values()):  # NaN fails, too
        yield FieldViolation("sampling.logit_bias", f"values must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
    allowed, banned = list(sampling.allowed_token_ids), list(sampling.banned_token_ids)
    for name, ids in (("allowed_token_ids", allowed), ("banned_token_ids", banned)):
        yield from check_token_ids(ids, model.vocab_size, f"sampling.{name}", MAX_TOKEN_SET)
    if banned and (set(banned) >= set(allowed) if allowed else len(set(banned)) >= model.vocab_size):
        yield FieldViolation("sampling.banned_token_ids", "no token is left to sample; ban fewer tokens")
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        yield FieldViolation("sampling.bad_words", f"too many words; use at most {MAX_BAD_WORDS}")
    for index, word in enumerate(sampling.bad_words[:MAX_BAD_WORDS]):
        if not 0 < len(word.encode()) <= MAX_BAD_WORD:
            yield FieldViolation(f"sampling.bad_words[{index}]", f"must have 1 to {MAX_BAD_WORD} bytes")


def scores_prompt(request: v1.GenerateRequest) -> bool:
    """Return whether the request asks only for its prompt (`max_tokens` is 0)."""
    wants_prompt = request.output.echo or request.output.HasField("prompt_logprobs")
    return wants_prompt and request.stop.HasField("max_tokens") and not request.stop.max_tokens


def _check_stop(request: v1.GenerateRequest, model: link_pb2.ServedModel) -> Violations:
    stop = request.stop
    if stop.HasField("max_tokens") and not (1 <= stop.max_tokens < model.max_model_len or scores_prompt(request)):
        what = f"must lie in [1, {model.max_model_len - 1}]; 0 needs echo or prompt_logprobs, to score the prompt"
        yield FieldViolation("stop.max_tokens", what)
    if stop.min_tokens > (stop.max_tokens if stop.HasField("max_tokens") else model.max_model_len):
        yield FieldViolation("stop.min_tokens", "must be <= max_tokens and <= the model's context length")
    if len(stop.stop_strings) > MAX_STOP_STRINGS:
        yield FieldViolation("stop.stop_strings", f"too many strings; use at most {MAX_STOP_STRINGS}")
    for index, stop_string in enumerate(stop.stop_strings[:MAX_STOP_STRINGS]):
        if not 0 < len(stop_string.encode()) <= MAX_STOP_STRING:
            yield FieldViolation(f"stop.stop_strings[{index}]", f"must have 1 to {MAX_STOP_STRING} bytes")
    yield from check_token_ids(list(stop.stop_token_ids), model.vocab_size, "stop.stop_token_ids", MAX_STOP_TOKEN_IDS)


def _check_resumable(request: v1.GenerateRequest) -> Violations:
    if request.resumable and not request.request_id:
        yield FieldViolation("resumable", "requires request_id; set it, because Resume finds the request by it")


def _check_output(output: v1.OutputOptions) -> Violations:
    if output.HasField("truncate_prompt_tokens"):
        yield from check_truncation(output.truncate_prompt_tokens, "output.truncate_prompt_tokens")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(output, name) > MAX_LOGPROBS:
            yield FieldViolation(f"output.{name}", f"must lie in [0, {MAX_LOGPROBS}]")


def _sampling_params(
    request: v1.GenerateRequest, stop_token_ids: tuple[int, ...], *, has_grammar: bool
) -> plan_pb2.SamplingParams:
    """Return the sampling parameters for the worker; only values that differ from the defaults are set."""
    sampling, stop, output = request.sampling, request.stop, request.output
    params = plan_pb2.SamplingParams(
        temperature=_temperature(sampling),
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        allowed_token_ids=to_column(list(dict.fromkeys(sampling.allowed_token_ids))),
        banned_token_ids=to_column(list(dict.fromkeys(sampling.banned_token_ids))),
        min_tokens=stop.min_tokens,
        seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
    )
    if sampling.logit_bias:
        biases = sorted(sampling.logit_bias.items())
        params.bias_token_ids = to_column([token_id for token_id, _ in biases])
        params.bias_values = struct.pack(f"<{len(biases)}f", *(value for _, value in biases))
    if stop.min_tokens or has_grammar:
        params.stop_token_ids = to_column(stop_token_ids)
    if output.HasField("logprobs"):
        params.logprobs = output.logprobs
    if output.HasField("prompt_logprobs"):
        params.prompt_logprobs = output.prompt_logprobs
    return params


def _temperature(sampling: v1.SamplingOptions) -> float:
    if not sampling.HasField("temperature"):
        return 1.0
    return sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0


def _can_sample(sampling: v1.SamplingOptions, forbidden: tuple[int, ...], model: link_pb2.ServedModel) -> bool:
    """Return whether a token outside `forbidden` may be sampled."""
    allowed, gone = set(sampling.allowed_token_ids), {*sampling.banned_token_ids, *forbidden}
    return bool(allowed - gone) if allowed else len(gone) < model.vocab_size


def _reject_unsupported(request: v1.GenerateRequest) -> None:
    is_set = {
        "adapter": bool(request.adapter),
    }
    for field, present in is_set.items():
        if present:
            raise UnsupportedFieldError(field)
