"""OpenTelemetry as every process uses it: one tracer provider, W3C trace context, export off the hot path.

Spans are exported by OTLP/gRPC from a background thread when an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set or
`OTEL_TRACES_EXPORTER=otlp`; sampling, batch sizes, resource attributes and the rest are read from the `OTEL_*`
variables by the SDK itself. Without an endpoint the provider samples nothing, so that spans cost next to nothing.

A trace context crosses processes as the text of a W3C `traceparent`, the empty string meaning "not traced".
"""

import os

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

MAX_LINKS = 128
"""The SDK drops further links of a span silently."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer of one process; `shutdown` flushes what has not been exported."""

    def __init__(self, service: str) -> None:
        resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
        self.exports = exporting()
        """Whether spans go anywhere."""
        self._processor = BatchSpanProcessor(OTLPSpanExporter()) if self.exports else None
        if self._processor is None:
            provider = always = TracerProvider(resource=resource, sampler=ALWAYS_OFF)
        else:
            provider = TracerProvider(resource=resource)
            always = TracerProvider(resource=resource, sampler=ALWAYS_ON)
            for each in (provider, always):
                each.add_span_processor(self._processor)
        self.tracer = provider.get_tracer("quire")
        self.forced_tracer = always.get_tracer("quire")
        """For root spans that exist only because a sampled request needs them: the sampler is not asked again."""

    def shutdown(self) -> None:
        """Exports what is pending, bounded in time by the exporter's own timeout."""
        if self._processor is not None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]


def exporting() -> bool:
    """Whether the environment asks for spans to be exported."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return "otlp" in exporter.split(",")
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def to_traceparent(span: trace.Span) -> str:
    """The span's context as a W3C traceparent, or "" when it is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, otel_context.Context()))
    return carrier.get("traceparent", "")


def from_traceparent(traceparent: str) -> otel_context.Context:
    """The context to start a child span in; an empty or malformed traceparent gives an empty context."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, otel_context.Context())
