"""Names of all spans and their attributes; docs/metrics.md is generated from this module.

The spans of calls follow OpenTelemetry's conventions for RPC and HTTP. For work within an inference server, the
conventions define no spans, so Quire uses stable names under `quire.`.
"""

from dataclasses import dataclass

TOKENIZE = "quire.tokenize"
PROMPT = "quire.prompt"
QUEUE = "quire.queue"
ATTEMPT = "quire.attempt"
PREFILL = "quire.prefill"
DECODE = "quire.decode"
STEP = "quire.step"
WORKER_ROW = "quire.worker.row"
WORKER_STEP = "quire.worker.step"
LINKS = "quire.links"


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """Description of a span."""

    process: str
    parent: str
    meaning: str
    attributes: tuple[str, ...] = ()


_CALL = (
    *("error.type", "quire.request_id", "quire.preemptions", "quire.tail"),
    *("quire.draft_tokens", "quire.accepted_draft_tokens"),
)
SPANS = {
    "{rpc.method}": SpanInfo(
        "front end",
        "the client's span",
        "a gRPC call",
        ("rpc.system.name", "rpc.method", "rpc.response.status_code", *_CALL),
    ),
    "{http.request.method} {http.route}": SpanInfo(
        "front end",
        "the client's span",
        "an HTTP request",
        ("http.request.method", "http.route", "http.response.status_code", "url.path", "url.scheme", *_CALL),
    ),
    PROMPT: SpanInfo("front end", "the HTTP request", "one of several prompts of an HTTP request", _CALL),
    TOKENIZE: SpanInfo("front end", "the call", "conversion of a prompt into token ids"),
    QUEUE: SpanInfo("scheduler", "the call", "one wait of the request for a worker"),
    ATTEMPT: SpanInfo(
        "scheduler",
        "the call",
        "one placement on a worker, until it ends or is preempted; links to its steps",
        ("quire.request_id", "quire.attempt", "quire.worker", "quire.tokens", "quire.outcome"),
    ),
    PREFILL: SpanInfo("scheduler", ATTEMPT, "from the first step to the first token of the attempt"),
    DECODE: SpanInfo("scheduler", ATTEMPT, "from the first token of the attempt to its end"),
    STEP: SpanInfo(
        "scheduler",
        "none: a trace of its own",
        "one step of a worker with a traced request, from plan to answer; links to the attempts in it",
        ("quire.worker", "quire.epoch", "quire.step", "quire.tokens", "quire.decode_rows", "quire.prefill_rows"),
    ),
    WORKER_ROW: SpanInfo(
        "worker",
        ATTEMPT,
        "the time that the request holds a row of the worker; links to its first steps",
        (
            *("quire.worker", "quire.request_id", "quire.row", "quire.generation", "quire.prompt_tokens"),
            "quire.tokens_computed",
            *("quire.draft_tokens", "quire.accepted_draft_tokens"),
        ),
    ),
    WORKER_STEP: SpanInfo(
        "worker",
        STEP,
        "the execution of a step; links to the rows in it",
        ("quire.worker", "quire.step", "quire.rows", "quire.tokens", "quire.prefill_tokens", "quire.continuation"),
    ),
    LINKS: SpanInfo("scheduler", STEP + " or " + ATTEMPT, "further links of a span that already has 128"),
}
"""All spans by name; `{…}` stands for an attribute."""

ATTRIBUTES = {
    "error.type": "reason of an error, as in ErrorInfo",
    "rpc.system.name": "grpc",
    "rpc.method": "service and method, as `quire.v1.GenerationService/Generate`",
    "rpc.response.status_code": "status of the call as a string, as `OK`",
    "http.request.method": "method",
    "http.route": "path",
    "http.response.status_code": "status of the answer",
    "url.path": "path",
    "url.scheme": "http or https",
    "quire.request_id": "id of the request",
    "quire.preemptions": "times that the request was preempted",
    "quire.tail": "why an unsampled call was exported: failed, target (it missed its own target), slow",
    "quire.attempt": "number of the attempt, from 0",
    "quire.tokens": "tokens of the sequence (attempt) or of the step",
    "quire.outcome": "why the attempt ended: finished, preempted, moved, worker lost, prefix failed or an end reason",
    "quire.worker": "name of the worker; `quire explain --step WORKER:STEP` shows the step",
    "quire.epoch": "epoch of the worker, hexadecimal",
    "quire.step": "number of the step in its epoch",
    "quire.decode_rows": "rows that decode in the step",
    "quire.prefill_rows": "rows with a chunk of their prompt in the step",
    "quire.row": "row of the worker's batch",
    "quire.generation": "generation of the row",
    "quire.prompt_tokens": "tokens of the prompt",
    "quire.tokens_computed": "tokens whose KV was computed in the row",
    "quire.draft_tokens": "draft tokens verified for the call or in the row; absent if none",
    "quire.accepted_draft_tokens": "accepted draft tokens",
    "quire.rows": "rows in the step",
    "quire.prefill_tokens": "prompt tokens in the step",
    "quire.continuation": "number of a continuation span with more links of the same step",
}
"""Attributes that are always set."""

OPT_IN_ATTRIBUTES = {
    "rpc.system": "with `rpc/dup`: grpc",
    "rpc.service": "with `rpc/dup`: the service",
    "rpc.grpc.status_code": "with `rpc/dup`: the status as a number",
    "gen_ai.operation.name": "chat, text_completion or embeddings",
    "gen_ai.provider.name": "quire",
    "gen_ai.request.model": "model that the client asked for",
    "gen_ai.request.max_tokens": "maximum number of output tokens",
    "gen_ai.request.temperature": "sampling parameter",
    "gen_ai.request.top_p": "sampling parameter",
    "gen_ai.request.top_k": "sampling parameter",
    "gen_ai.request.frequency_penalty": "sampling parameter",
    "gen_ai.request.presence_penalty": "sampling parameter",
    "gen_ai.request.seed": "sampling parameter",
    "gen_ai.request.stream": "true",
    "gen_ai.request.choice.count": "number of choices, if above 1",
    "gen_ai.response.id": "id of the request",
    "gen_ai.response.model": "model that answered",
    "gen_ai.response.finish_reasons": "stop or length, one for each choice",
    "gen_ai.response.time_to_first_chunk": "seconds to the first token",
    "gen_ai.usage.input_tokens": "tokens of the prompt",
    "gen_ai.usage.output_tokens": "generated tokens",
    "gen_ai.usage.cache_read.input_tokens": "prompt tokens found in the prefix cache",
    "gen_ai.latency.time_in_queue": "seconds in the queue; a key that vLLM and SGLang use too",
    "gen_ai.latency.time_to_first_token": "seconds to the first token",
    "gen_ai.latency.e2e": "seconds from arrival to the end",
    "gen_ai.embeddings.dimension.count": "elements of an embedding",
}
"""Attributes that `OTEL_SEMCONV_STABILITY_OPT_IN` adds: `gen_ai.*` with `gen_ai_latest_experimental`."""
