"""Converts the fields that completions and chat share to `GenerateRequest`, and maps field names back."""

import json
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from quire.v1 import generation_pb2 as v1
from services.http.schema import JsonObject, SamplingBody, ScheduledBody
from shared.errors import FieldViolation, InvalidRequestError
from shared.request_spec import MAX_RETENTION_S

_SEED_MASK = 2**64 - 1
_SAMPLING = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NAMES = {
    "stop.stop_strings": "stop",
    "stop.include_stop_string": "include_stop_str_in_output",
    "output.include_special_tokens": "skip_special_tokens",
    "scheduling.ttft_target": "ttft_target_s",
    "scheduling.total_time_target": "total_time_target_s",
    "scheduling.retention": "retention_s",
    "scheduling.expected_pause": "expected_pause_s",
    "scheduling.cache_scope": "cache_salt",
}
"""HTTP names of proto fields, where the name differs from the last part of the field's path."""


def field_names(given: dict[str, str] | None = None) -> "FieldNames":
    """Return one request's field names; `given` overrides names for this request."""
    return FieldNames(_NAMES | (given or {}))


class FieldNames:
    """Maps a field's path in the proto to its name in HTTP."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def __call__(self, path: str) -> str:
        """Return the HTTP name with the same list indices. JSON text in the proto is a JSON value in HTTP."""
        for prefix in _prefixes(path):
            if prefix in self._names:
                return self._names[prefix] + path[len(prefix) :].removesuffix("_json")
        return path.rpartition(".")[2].removesuffix("_json")


def fill_common(request: v1.GenerateRequest, body: SamplingBody, request_id: str) -> None:
    """Write all fields except prompt, lengths, log-probabilities and grammar."""
    request.request_id = request_id
    request.model = body.model
    sampling, stop, output = request.sampling, request.stop, request.output
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(body.top_k, 0)
    if body.seed is not None:
        sampling.seed = body.seed & _SEED_MASK
    if body.n != 1:
        sampling.n = body.n
    for token_id, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[int(token_id)] = bias
    sampling.allowed_token_ids.extend(body.allowed_token_ids or ())
    sampling.banned_token_ids.extend(body.banned_token_ids or ())
    sampling.bad_words.extend(body.bad_words or ())
    stop.stop_strings.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    stop.stop_token_ids.extend(body.stop_token_ids or ())
    stop.include_stop_string = body.include_stop_str_in_output
    stop.ignore_eos = body.ignore_eos
    stop.min_tokens = body.min_tokens or 0
    output.include_special_tokens = not body.skip_special_tokens
    if body.prompt_logprobs is not None:
        output.prompt_logprobs = body.prompt_logprobs
    if body.kept_prompt_tokens is not None:
        output.truncate_prompt_tokens = body.kept_prompt_tokens
    fill_scheduling(request.scheduling, body)
    if body.retention_s is None and body.prompt_cache_retention == "24h":
        request.scheduling.retention.CopyFrom(_duration(MAX_RETENTION_S))
    if body.expected_output_tokens is not None:
        request.scheduling.expected_output_tokens = body.expected_output_tokens


def fill_scheduling(scheduling: v1.SchedulingOptions, body: ScheduledBody) -> None:
    """Write the scheduling options."""
    # HTTP follows vLLM, where a lower value is more urgent.
    scheduling.priority = -body.priority
    scheduling.tenant = body.tenant or ""
    scheduling.request_class = body.request_class or ""
    scheduling.cache_scope = body.cache_salt or ""
    scheduling.session_id = body.session_id or ""
    scheduling.ends_session = body.ends_session
    scheduling.retention_priority = body.retention_priority
    for name in ("ttft_target", "total_time_target", "retention", "expected_pause"):
        if (seconds := getattr(body, f"{name}_s")) is not None:
            getattr(scheduling, name).CopyFrom(_duration(seconds))


def fill_grammar(request: v1.GenerateRequest, body: SamplingBody) -> str:
    """Write the grammar; return its field name, or empty if there is none.

    Raises:
        InvalidRequestError: several constraints are given.
    """
    constraints = list(_constraints(body))
    if len(constraints) > 1:
        (first, _), (second, _) = constraints[:2]
        raise InvalidRequestError(FieldViolation(second, f"cannot be combined with {first}; use one constraint"))
    for name, grammar in constraints:
        request.grammar.CopyFrom(grammar)
        return name
    return ""


def _constraints(body: SamplingBody) -> Iterator[tuple[str, v1.Grammar]]:
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield "response_format", v1.Grammar(json_object=True, whitespace=form.whitespace)
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise InvalidRequestError(FieldViolation("response_format.json_schema", "missing; it is required"))
        schema = json.dumps(form.json_schema.schema_)
        yield "response_format", v1.Grammar(json_schema=schema, whitespace=form.whitespace)
    yield from _from_vllm(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, json_object=None
    )
    outputs = body.structured_outputs
    if outputs is not None:
        for name, grammar in _from_vllm(
            "structured_outputs.",
            outputs.json_,
            outputs.regex,
            outputs.choice,
            outputs.grammar,
            json_object=outputs.json_object,
        ):
            grammar.whitespace = outputs.whitespace
            yield name, grammar


def _from_vllm(
    prefix: str,
    schema: JsonObject | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    *,
    json_object: bool | None,
) -> Iterator[tuple[str, v1.Grammar]]:
    if schema is not None:
        yield prefix + "json", v1.Grammar(json_schema=schema if isinstance(schema, str) else json.dumps(schema))
    if regex is not None:
        yield prefix + "regex", v1.Grammar(regex=regex)
    if choice is not None:
        yield prefix + "choice", v1.Grammar(choice=v1.ChoiceGrammar(choices=choice))
    if grammar is not None:
        yield prefix + "grammar", v1.Grammar(ebnf=grammar)
    if json_object:
        yield prefix + "json_object", v1.Grammar(json_object=True)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _prefixes(path: str) -> Iterator[str]:
    """Yield the path, then its prefixes before each bracket and dot, longest first."""
    yield path
    for position in range(len(path) - 1, 0, -1):
        if path[position] in ".[":
            yield path[:position]
