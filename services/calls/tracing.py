"""Server span of a request, following OpenTelemetry's conventions for RPC, HTTP and generative AI.

RPC spans follow the release candidate of the conventions. `OTEL_SEMCONV_STABILITY_OPT_IN` is a list with two possible
entries. `rpc/dup` adds the attributes of the earlier conventions. `gen_ai_latest_experimental` adds the attributes
`gen_ai.*`, which are off by default because they are experimental.

The span is a child of the client's W3C traceparent. The span's traceparent is sent to the core with the request, so
that one trace leads from the client to the steps on the device. A call with several requests to the core has one server
span with one child span per request. Prompts and outputs are never recorded. `services.tail` may export calls that were
not sampled.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.metrics import PROVIDER
from services.requests.validation import ValidRequest
from services.tail import TailTracing
from shared.errors import QuireError
from shared.telemetry import from_traceparent

TRACEPARENT_KEY = "traceparent"
"""Metadata key of the W3C trace context."""
GEN_AI_OPT_IN = "gen_ai_latest_experimental"
OPT_INS = frozenset(each.strip() for each in os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(","))
"""Conventions that the operator has opted into."""

_GRPC_CODES = {code.name: code.value[0] for code in grpc.StatusCode}
_SERVER_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
"""gRPC status codes that make a server span an error. The client causes all other codes."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Span name and attributes of a call, which depend on the protocol."""

    name: str
    """Name of the span."""
    attributes: Mapping[str, str]
    status_key: str
    """Attribute for the outcome; empty for none."""
    status_of: Callable[[QuireError], str | int]
    """Returns the attribute's value for an error."""
    internal: str | int
    """Value for an unexpected error."""
    success: str | int | None = None
    """Value for a success; None to omit the attribute."""
    kind: SpanKind = SpanKind.SERVER
    """Span kind. INTERNAL marks one part of a call, as a child of the current span."""


def rpc(method: str, service: str = "quire.v1.GenerationService") -> Operation:
    """Return the operation of a gRPC call."""
    return Operation(
        name=f"{service}/{method}",
        attributes={"rpc.system.name": "grpc", "rpc.method": f"{service}/{method}"},
        status_key="rpc.response.status_code",
        status_of=lambda error: error.code,
        internal="INTERNAL",
        success="OK",
    )


def part_of(operation: Operation, name: str) -> Operation:
    """Return the operation for one part of a call that has its own span."""
    return replace(operation, name=name, attributes={}, status_key="", success=None, kind=SpanKind.INTERNAL)


@contextmanager
def request_span(
    tracer: Tracer, traceparent: str, operation: Operation, tail: TailTracing | None = None
) -> Iterator[Span]:
    """Start one request's span and make it current. If an error occurs, record its reason.

    Args:
        tracer: the tracer.
        traceparent: the client's W3C traceparent; may be empty.
        operation: name and attributes of the span.
        tail: the tail rule for an unsampled request; None without a rule.
    """
    span = tracer.start_span(
        operation.name,
        context=from_traceparent(traceparent) if operation.kind is SpanKind.SERVER else None,
        kind=operation.kind,
        attributes=operation.attributes,
    )
    if tail is not None and not span.is_recording():
        context = span.get_span_context()
        span = tail.begin(context, operation.name, operation.kind, operation.attributes, traceparent)
    try:
        # Do not record the text of an unexpected exception, because it may contain confidential data.
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
        if operation.success is not None:
            _set_status(span, operation, operation.success)
    except QuireError as error:
        _mark(span, operation, operation.status_of(error), error.reason)
        raise
    except Exception:
        _mark(span, operation, operation.internal, "INTERNAL")
        raise
    except BaseException:
        # The client has disconnected. gRPC reports CANCELLED for its call; HTTP has no status to report.
        _mark(span, operation, "CANCELLED" if operation.success == "OK" else None, "CANCELLED")
        raise
    finally:
        span.end()


def operation_name(request: v1.GenerateRequest) -> str:
    """Return `gen_ai.operation.name` of a generation."""
    return "chat" if request.WhichOneof("input") == "chat" else "text_completion"


def describe_request(span: Span, request: ValidRequest, *, operation: str, prompt_tokens: int, max_tokens: int) -> None:
    """Record the attributes of a request."""
    if not span.is_recording():
        return
    span.set_attribute("quire.request_id", request.request_id)
    if GEN_AI_OPT_IN not in OPT_INS:
        return
    sampling: plan_pb2.SamplingParams = request.sampling
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": prompt_tokens,
    }
    if request.num_choices > 1:
        attributes["gen_ai.request.choice.count"] = request.num_choices
    span.set_attributes(attributes)


def describe_answer(
    span: Span, answer: v1.Finished, finish_reasons: Sequence[str], ends: Sequence[link_pb2.StreamEnd]
) -> None:
    """Record the response attributes; `ends` are the ends of all choices."""
    if not span.is_recording():
        return
    usage, timings = answer.usage, answer.timings
    span.set_attribute("quire.preemptions", usage.preemptions)
    drafts = sum(end.draft_tokens for end in ends)
    if drafts:
        span.set_attribute("quire.draft_tokens", drafts)
        span.set_attribute("quire.accepted_draft_tokens", sum(end.accepted_draft_tokens for end in ends))
    if GEN_AI_OPT_IN not in OPT_INS:
        return
    span.set_attributes(
        {
            "gen_ai.response.model": answer.model,
            "gen_ai.response.finish_reasons": tuple(finish_reasons),
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
            "gen_ai.latency.time_in_queue": timings.queued.ToNanoseconds() / 1e9,
            "gen_ai.latency.e2e": timings.total.ToNanoseconds() / 1e9,
        }
    )
    if timings.HasField("first_token"):
        seconds = timings.first_token.ToNanoseconds() / 1e9
        span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)
        span.set_attribute("gen_ai.latency.time_to_first_token", seconds)


def describe_embedding(span: Span, request_id: str, *, model: str, num_tokens: int, dimensions: int) -> None:
    """Record the attributes of an embedding request."""
    if not span.is_recording():
        return
    span.set_attribute("quire.request_id", request_id)
    if GEN_AI_OPT_IN not in OPT_INS:
        return
    span.set_attributes(
        {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": num_tokens,
            "gen_ai.embeddings.dimension.count": dimensions,
        }
    )


def _mark(span: Span, operation: Operation, status: str | int | None, reason: str) -> None:
    """Record an error. The span itself is marked as an error only if the server caused it."""
    span.set_attribute("error.type", reason)
    if status is not None and operation.status_key:
        _set_status(span, operation, status)
    by_client = status < 500 if isinstance(status, int) else status is not None and status not in _SERVER_FAULTS
    if not by_client:
        span.set_status(Status(StatusCode.ERROR, reason))


def _set_status(span: Span, operation: Operation, status: str | int) -> None:
    span.set_attribute(operation.status_key, status)
    if "rpc/dup" in OPT_INS and isinstance(status, str):
        service = operation.name.rpartition("/")[0]
        span.set_attributes(
            {
                "rpc.system": "grpc",
                "rpc.service": service,
                "rpc.grpc.status_code": _GRPC_CODES.get(status, 2),
            }
        )
