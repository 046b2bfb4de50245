"""OpenTelemetry as every process uses it: one tracer provider, W3C trace context, export off the hot path.

Spans are exported by OTLP/gRPC from a background thread when an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set or
`OTEL_TRACES_EXPORTER=otlp`; sampling, batch sizes, resource attributes and the rest are read from the `OTEL_*`
variables by the SDK itself, and win over what a process says of itself. An exporter or a protocol that Quire does not
have is an error at the start. Without an endpoint the provider samples nothing, so that spans cost next to nothing.

A trace context crosses processes as the text of a W3C `traceparent`, the empty string meaning "not traced". A
`tracestate`, which vendors use for notes of their own, ends at the front end.
"""

import os
from collections.abc import Mapping

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.config import ConfigError

MAX_LINKS = 128
"""The SDK drops further links of a span silently."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer of one process; `shutdown` flushes what has not been exported."""

    def __init__(self, service: str) -> None:
        """Reads the environment.

        Args:
            service: `service.name`, unless the environment gives another one.

        Raises:
            ConfigError: the environment asks for an exporter or a protocol that Quire does not have.
        """
        resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
        resource = resource.merge(OTELResourceDetector().detect())  # `create` lets its arguments win
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


def exporting(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for spans to be exported.

    Raises:
        ConfigError: by an exporter or a protocol that Quire does not have.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "").split(",")} - {""}
    if unknown := exporters - {"otlp", "none"}:
        raise ConfigError(f"OTEL_TRACES_EXPORTER={min(unknown)!r}: choose otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if "otlp" not in exporters and (exporters or not any(environ.get(name) for name in endpoints)):
        return False
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name, "").strip():
            if protocol != "grpc":
                raise ConfigError(f"{name}={protocol!r}: spans are exported by grpc only (port 4317 of a collector)")
            break  # the first of the two decides
    return True


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
