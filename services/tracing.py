"""The server span of a generation, named and described as OpenTelemetry's conventions for RPC and generative AI say.

It is a child of the client's W3C traceparent, and its own traceparent goes to the core with the request, so that one
trace leads from the client to the steps on the device. Nothing of a prompt or an answer is recorded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from protos.quire.plan.v1 import plan_pb2
from services.validation import ValidRequest
from shared.errors import QuireError
from shared.telemetry import from_traceparent

TRACEPARENT_KEY = "traceparent"
"""The metadata entry of the W3C trace context."""

_SERVICE = "quire.v1.GenerationService"


@contextmanager
def server_span(tracer: Tracer, traceparent: str, method: str) -> Iterator[Span]:
    """The span of one generation, current while it runs. An error marks it by its reason."""
    span = tracer.start_span(
        f"{_SERVICE}/{method}",
        context=from_traceparent(traceparent),
        kind=SpanKind.SERVER,
        attributes={
            "rpc.system": "grpc",
            "rpc.service": _SERVICE,
            "rpc.method": method,
            "gen_ai.provider.name": "quire",
        },
    )
    try:
        # The text of an unexpected exception is not ours and may hold anything: it is not recorded.
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    except QuireError as error:
        _mark(span, error.code, error.reason)
        raise
    except Exception:
        _mark(span, "INTERNAL", "INTERNAL")
        raise
    except BaseException:
        _mark(span, "CANCELLED", "CANCELLED")
        raise
    finally:
        span.end()


def describe_request(span: Span, request: ValidRequest, *, chat: bool, prompt_tokens: int, max_tokens: int) -> None:
    """What is asked for."""
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
    """What came of it."""
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


def _mark(span: Span, code: str, reason: str) -> None:
    span.set_attribute("error.type", reason)
    span.set_attribute("rpc.response.status_code", code)
    span.set_status(Status(StatusCode.ERROR, reason))
