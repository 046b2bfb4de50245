"""Server span of a request, following OpenTelemetry's conventions for RPC, HTTP and generative AI.

The span is a child of the client's W3C traceparent. Its own traceparent goes to the core with the request, so that one
trace leads from the client to the steps on the device. A call with several requests to the core has one server span
with a child span for each. Prompts and outputs are never recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from protos.quire.plan.v1 import plan_pb2
from services.requests.validation import ValidRequest
from shared.errors import QuireError
from shared.telemetry import from_traceparent

TRACEPARENT_KEY = "traceparent"
"""Metadata key of the W3C trace context."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Span name and attributes of a call; they differ by protocol."""

    name: str
    """Name of the span."""
    attributes: Mapping[str, str]
    status_key: str
    """Attribute of the outcome; empty: none."""
    status_of: Callable[[QuireError], str | int]
    """Returns the attribute's value for an error."""
    internal: str | int
    """Value for an unexpected error."""
    success: str | int | None = None
    """Value for a success; None: the attribute is left out."""
    kind: SpanKind = SpanKind.SERVER
    """Kind of the span. INTERNAL: a part of a call, a child of the current span."""


def rpc(method: str, service: str = "quire.v1.GenerationService") -> Operation:
    """Return the operation of a gRPC call."""
    return Operation(
        name=f"{service}/{method}",
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        status_key="rpc.response.status_code",
        status_of=lambda error: error.code,
        internal="INTERNAL",
    )


def part_of(operation: Operation, name: str) -> Operation:
    """Return the operation of a part of a call that has its own span."""
    return replace(operation, name=name, attributes={}, status_key="", success=None, kind=SpanKind.INTERNAL)


@contextmanager
def request_span(tracer: Tracer, traceparent: str, operation: Operation) -> Iterator[Span]:
    """Start the span of one request and make it current. An error is recorded by its reason."""
    span = tracer.start_span(
        operation.name,
        context=from_traceparent(traceparent) if operation.kind is SpanKind.SERVER else None,
        kind=operation.kind,
        attributes={**operation.attributes, "gen_ai.provider.name": "quire"},
    )
    try:
        # The text of an unexpected exception may contain anything, so it is not recorded.
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
        if operation.success is not None:
            span.set_attribute(operation.status_key, operation.success)
    except QuireError as error:
        _mark(span, operation, operation.status_of(error), error.reason)
        raise
    except Exception:
        _mark(span, operation, operation.internal, "INTERNAL")
        raise
    except BaseException:
        # The client has disconnected, so there is no status to report.
        _mark(span, operation, "CANCELLED" if operation.success is None else None, "CANCELLED")
        raise
    finally:
        span.end()


def describe_request(span: Span, request: ValidRequest, *, chat: bool, prompt_tokens: int, max_tokens: int) -> None:
    """Record the attributes of a request."""
    if not span.is_recording():
        return
    sampling: plan_pb2.SamplingParams = request.sampling
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.stream": True,
            "gen_ai.response.id": request.request_id,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "quire.request_id": request.request_id,
        }
    )


def describe_answer(
    span: Span, *, finish_reasons: Sequence[str], output_tokens: int, cached_tokens: int, preemptions: int
) -> None:
    """Record the attributes of an answer."""
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": tuple(finish_reasons),
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "quire.preemptions": preemptions,
        }
    )


def describe_embedding(span: Span, request_id: str, *, model: str, num_tokens: int, dimensions: int) -> None:
    """Record the attributes of an embedding request."""
    if not span.is_recording():
        return
    span.set_attributes(
        {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.request.model": model,
            "gen_ai.response.id": request_id,
            "gen_ai.usage.input_tokens": num_tokens,
            "gen_ai.embeddings.dimension.count": dimensions,
            "quire.request_id": request_id,
        }
    )


def _mark(span: Span, operation: Operation, status: str | int | None, reason: str) -> None:
    span.set_attribute("error.type", reason)
    if status is not None and operation.status_key:
        span.set_attribute(operation.status_key, status)
    # A client error (4xx) is not an error of the server span.
    if not (isinstance(status, int) and status < 500):
        span.set_status(Status(StatusCode.ERROR, reason))
