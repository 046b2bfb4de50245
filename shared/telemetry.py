"""OpenTelemetry setup of each process: one tracer provider, W3C trace context, export in the background.

Spans are exported by OTLP/gRPC from a background thread if an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set or
`OTEL_TRACES_EXPORTER=otlp`, metrics likewise (`OTEL_METRICS_EXPORTER`). If a collector is down or slow, spans are
dropped and counted. The SDK reads all other settings, such as sampling, batch sizes and resource attributes, from the
`OTEL_*` variables, which override the process's attributes. An unsupported exporter or protocol is an error at the
start. Without an endpoint, the provider samples no spans, so spans cost almost nothing.

A trace context is passed between processes as a W3C `traceparent`; an empty string means "not sampled". The front end
does not forward `tracestate`.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.config import ConfigError
from shared.logging import get_logger

if TYPE_CHECKING:
    from shared.otlp_metrics import Families, MetricsPush

MAX_LINKS = 128
"""Maximum number of links per span; the SDK silently drops further links."""
SHUTDOWN_S = 5.0
"""Maximum time for which an exiting process waits for the collector, s."""

_QUEUE_SIZE = 2048
"""Default of `OTEL_BSP_MAX_QUEUE_SIZE`: spans that may wait for their export."""
_BATCH_SIZE = 512
"""Default of `OTEL_BSP_MAX_EXPORT_BATCH_SIZE`: spans of one export."""
_DELAY_MS = 5_000
"""Default of `OTEL_BSP_SCHEDULE_DELAY`: time between two span exports, ms."""
_PUSH_INTERVAL_MS = 60_000
"""Default of `OTEL_METRIC_EXPORT_INTERVAL`: time between two metric exports, ms."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """One process's tracer, and the export of its spans and metrics."""

    exports = False
    """Whether spans are exported."""
    _pushed_as: Resource | None = None
    """Resource for the metrics; None if they are not exported."""
    _push_interval_s = 0.0
    _push: "MetricsPush | None" = None
    _processor: "_CountingProcessor | None" = None

    def __init__(self, service: str) -> None:
        """Read the environment.

        Args:
            service: `service.name`, unless the environment sets another one.

        Raises:
            ConfigError: the environment sets an unsupported exporter or protocol, or a number that is not valid.
        """
        resource = Resource.create({"service.name": service, "process.pid": os.getpid()})
        # Merge the environment again, because the arguments to `create` override the environment.
        resource = resource.merge(OTELResourceDetector().detect())
        self.exports = exporting()
        self.forced_ids = ReusableIds()
        """Source of ids for spans from `forced_tracer`."""
        if self.exports:
            self._processor = _CountingProcessor()
            provider = TracerProvider(resource=resource)
            always = TracerProvider(resource=resource, sampler=ALWAYS_ON, id_generator=self.forced_ids)
            for each in (provider, always):
                each.add_span_processor(self._processor)
        else:
            provider = always = TracerProvider(resource=resource, sampler=ALWAYS_OFF)
        self.tracer = provider.get_tracer("quire")
        self.forced_tracer = always.get_tracer("quire")
        """Tracer without sampling, for spans that were selected by other means."""
        if exporting(signal="METRICS"):
            self._push_interval_s = _number("OTEL_METRIC_EXPORT_INTERVAL", _PUSH_INTERVAL_MS) / 1000
            self._pushed_as = resource

    @property
    def traces_tail(self) -> bool:
        """Whether slow and failed requests are traced although they were not sampled."""
        return self.exports and os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() != "always_off"

    @property
    def spans_dropped(self) -> int:
        """Number of spans that were lost because the collector was down or slow."""
        return 0 if self._processor is None else self._processor.dropped

    def push_metrics(self, families: "Callable[[], Families]") -> None:
        """Export the metrics if they are due; call it about once a second.

        If the exporter cannot be created, the error is logged and no metrics are exported.
        """
        if self._push is None and self._pushed_as is not None:
            try:
                from shared.otlp_metrics import MetricsPush

                self._push = MetricsPush(self._pushed_as, self._push_interval_s)
            except Exception as error:
                self._pushed_as = None
                get_logger().error("metrics are not exported; check the variables OTEL_*", error=repr(error))
        if self._push is not None:
            self._push.tick(families)

    def shutdown(self, families: "Families | None" = None) -> None:
        """Export pending spans and the last metrics. Stop trying after `SHUTDOWN_S`, because a service must end."""
        ending = []
        if self._processor is not None:
            ending.append(threading.Thread(target=self._processor.shutdown, daemon=True))
        if self._push is not None:
            ending.append(threading.Thread(target=self._push.shutdown, args=(families or [], SHUTDOWN_S), daemon=True))
        deadline = time.monotonic() + SHUTDOWN_S
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(max(deadline - time.monotonic(), 0.0))


class ReusableIds(RandomIdGenerator):
    """Random ids, except for the span after `reuse`."""

    def __init__(self) -> None:
        self._next: trace.SpanContext | None = None

    def reuse(self, context: trace.SpanContext) -> None:
        """Reuse the ids of an unsampled span, which are already in log lines, for the next span."""
        self._next = context

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self._next is None else self._next.trace_id

    def generate_span_id(self) -> int:
        context, self._next = self._next, None
        return super().generate_span_id() if context is None else context.span_id


class _CountingProcessor(BatchSpanProcessor):
    """Exports spans in the background, and counts lost spans."""

    def __init__(self) -> None:
        self._max_waiting = _number("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE_SIZE)
        batch_size, delay_ms = (
            _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH_SIZE),
            _number("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS),
        )
        self._exporter = _CountingExporter()
        super().__init__(
            self._exporter,
            # Add one place to the queue, because the exporter checks the size after taking a batch.
            max_queue_size=self._max_waiting + 1,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=min(batch_size, self._max_waiting),
        )
        self._taken = 0
        self._refused = 0

    @property
    def dropped(self) -> int:
        """Number of lost spans."""
        return self._refused + self._exporter.failed

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span; drop it if the queue is full."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._taken - self._exporter.handled >= self._max_waiting:
            self._refused += 1
            return
        self._taken += 1
        super().on_end(span)


class _CountingExporter(SpanExporter):
    """Exports by OTLP, and counts the spans of failed exports."""

    def __init__(self) -> None:
        # Import only if spans are exported, because the import uses 0.2 s of CPU time.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        try:
            self._inner = OTLPSpanExporter()
        except Exception as error:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_*: {error!r}; correct the variables of the exporter") from error
        self.handled = 0
        """Number of spans for which an export was attempted."""
        self.failed = 0
        """Number of handled spans that were lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch."""
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self.handled += len(spans)
            if result is not SpanExportResult.SUCCESS:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._inner.shutdown()


def exporting(environ: Mapping[str, str] = os.environ, signal: str = "TRACES") -> bool:
    """Return whether the environment enables the export of a signal, TRACES or METRICS.

    Raises:
        ConfigError: the exporter or the protocol is not supported.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    setting = f"OTEL_{signal}_EXPORTER"
    exporters = {name.strip() for name in environ.get(setting, "").split(",")} - {""}
    if unknown := exporters - {"otlp", "none"}:
        raise ConfigError(f"{setting}: {min(unknown)!r} is not supported; use otlp or none")
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if "otlp" not in exporters and (exporters or not any(environ.get(name) for name in endpoints)):
        return False
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name, "").strip():
            if protocol != "grpc":
                raise ConfigError(f"{name}: {protocol!r} is not supported; use grpc (port 4317 of the collector)")
            break  # The first of the two variables that is set decides.
    return True


def _number(name: str, default: int) -> int:
    """Return the value of an environment variable, or the default if it is empty.

    Raises:
        ConfigError: the value is not a positive number.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"{name}: {text!r} is not a positive number; set a whole number, such as {default}")
    return int(text)


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
