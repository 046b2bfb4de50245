"""OpenTelemetry setup of every process: one tracer provider, W3C trace context, export in the background.

Spans are exported by OTLP/gRPC from a background thread if an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set or
`OTEL_TRACES_EXPORTER=otlp`. The SDK itself reads sampling, batch sizes, resource attributes and the rest from the
`OTEL_*` variables, which override the process's own attributes. An unsupported exporter or protocol is an error at the
start. Without an endpoint the provider samples nothing, so that spans cost almost nothing.

A trace context crosses processes as a W3C `traceparent`; an empty string means "not sampled". A `tracestate` is not
passed on beyond the front end.
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
"""Maximum number of links of a span; the SDK drops further ones silently."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """Tracer of one process; `shutdown` exports pending spans."""

    def __init__(self, service: str) -> None:
        """Read the environment.

        Args:
            service: `service.name`, unless the environment sets another one.

        Raises:
            ConfigError: the environment sets an unsupported exporter or protocol.
        """
        resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
        resource = resource.merge(OTELResourceDetector().detect())  # the arguments of `create` override the environment
        self.exports = exporting()
        """Whether spans are exported."""
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
        """Tracer without sampling, for root spans that exist only because a sampled request needs them."""

    def shutdown(self) -> None:
        """Export pending spans, within the exporter's own timeout."""
        if self._processor is not None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]


def exporting(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment enables the export of spans.

    Raises:
        ConfigError: the exporter or the protocol is not supported.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "").split(",")} - {""}
    if unknown := exporters - {"otlp", "none"}:
        raise ConfigError(f"OTEL_TRACES_EXPORTER: {min(unknown)!r} is not supported; use otlp or none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if "otlp" not in exporters and (exporters or not any(environ.get(name) for name in endpoints)):
        return False
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name, "").strip():
            if protocol != "grpc":
                raise ConfigError(f"{name}: {protocol!r} is not supported; use grpc (port 4317 of the collector)")
            break  # the first of the two decides
    return True


def to_traceparent(span: trace.Span) -> str:
    """Return the span's context as a W3C traceparent, or "" when it is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, otel_context.Context()))
    return carrier.get("traceparent", "")


def from_traceparent(traceparent: str) -> otel_context.Context:
    """Return the parent context for a child span; empty for an empty or malformed traceparent."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, otel_context.Context())
