"""Exports metrics by OTLP: converts one process's families to OpenTelemetry data points and sends them.

The process's loop creates the data, because only the loop may read the values, and a thread sends it. Values are totals
since the start of the process, so the next export replaces data that could not be sent.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from protos.quire.link.v1 import link_pb2
from shared import metric_names
from shared.logging import get_logger
from shared.metric_names import Kind

_BY_NAME = {each.prometheus_name: each for each in metric_names.ALL if not each.is_foreign}
_CUMULATIVE = AggregationTemporality.CUMULATIVE

Families = list[link_pb2.MetricFamily]


class MetricsPush:
    """Sends the metrics of one process at intervals."""

    def __init__(self, resource: Resource, interval_s: float) -> None:
        self._resource = resource
        self._interval_s = interval_s
        self._due = time.monotonic() + interval_s
        self._started_ns = time.time_ns()
        self._exporter = OTLPMetricExporter()
        self._waiting: queue.Queue[MetricsData | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._send, daemon=True, name="metrics-push")
        self._thread.start()

    def tick(self, families: Callable[[], Families]) -> None:
        """Send the metrics if they are due and the previous export is complete; call this often."""
        now = time.monotonic()
        if now >= self._due and self._waiting.empty():
            self._due = now + self._interval_s
            self._waiting.put_nowait(to_otlp(families(), self._resource, self._started_ns, time.time_ns()))

    def shutdown(self, families: Families, timeout_s: float) -> None:
        """Send the last values. Stop trying after the timeout."""
        deadline = time.monotonic() + timeout_s
        for data in (to_otlp(families, self._resource, self._started_ns, time.time_ns()), None):
            try:
                self._waiting.put(data, timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Full:
                return
        self._thread.join(max(deadline - time.monotonic(), 0.001))

    def _send(self) -> None:
        is_logged = False
        while (data := self._waiting.get()) is not None:
            try:
                self._exporter.export(data)
            except Exception as error:
                # A failed export needs no retry, because the next export contains the same totals.
                if not is_logged:
                    get_logger().error("an export of metrics failed; further ones are not logged", error=repr(error))
                is_logged = True


def to_otlp(families: Iterable[link_pb2.MetricFamily], resource: Resource, start_ns: int, now_ns: int) -> MetricsData:
    """Convert families to OpenTelemetry metrics with their OpenTelemetry names.

    Args:
        families: one process's families; families with other servers' names are omitted.
        resource: the process.
        start_ns: time since which counters count, Unix nanoseconds.
        now_ns: time of the values, Unix nanoseconds.
    """
    metrics = [
        Metric(definition.name, definition.help, definition.unit, _data(definition, family, start_ns, now_ns))
        for family in families
        if family.samples and (definition := _BY_NAME.get(family.name)) is not None
    ]
    scope = ScopeMetrics(InstrumentationScope("quire"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _data(
    definition: metric_names.Metric, family: link_pb2.MetricFamily, start_ns: int, now_ns: int
) -> Histogram | Sum | Gauge:
    dotted = {name.replace(".", "_"): name for name in definition.labels}
    if definition.kind is Kind.HISTOGRAM:
        return Histogram(_histogram_points(definition, family, dotted, start_ns, now_ns), _CUMULATIVE)
    points = [
        NumberDataPoint(_attributes(sample.labels, dotted), start_ns, now_ns, sample.value) for sample in family.samples
    ]
    return Sum(points, _CUMULATIVE, is_monotonic=True) if definition.kind is Kind.COUNTER else Gauge(points)


def _histogram_points(
    definition: metric_names.Metric,
    family: link_pb2.MetricFamily,
    dotted: Mapping[str, str],
    start_ns: int,
    now_ns: int,
) -> list[HistogramDataPoint]:
    """Return one point per label set. A set's samples are adjacent: buckets, count, sum."""
    points = []
    counts: list[int] = []
    exemplars: list[Exemplar] = []
    below = total = 0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            counts.append(int(sample.value) - below)
            below = int(sample.value)
            if sample.HasField("exemplar"):
                exemplars.append(_exemplar(sample.exemplar))
        elif sample.name.endswith("_count"):
            total = int(sample.value)
        else:
            points.append(
                HistogramDataPoint(
                    attributes=_attributes(sample.labels, dotted),
                    start_time_unix_nano=start_ns,
                    time_unix_nano=now_ns,
                    count=total,
                    sum=sample.value,
                    bucket_counts=counts,
                    explicit_bounds=definition.bounds,
                    min=None,  # type: ignore[arg-type]  # not known, and optional in OTLP
                    max=None,  # type: ignore[arg-type]
                    exemplars=exemplars,
                )
            )
            counts, exemplars, below = [], [], 0
    return points


def _attributes(labels: Mapping[str, str], dotted: Mapping[str, str]) -> dict[str, str]:
    return {dotted.get(name, name): value for name, value in labels.items()}


def _exemplar(exemplar: link_pb2.Exemplar) -> Exemplar:
    return Exemplar(
        filtered_attributes={},
        value=exemplar.value,
        time_unix_nano=exemplar.unix_ns,
        span_id=int.from_bytes(exemplar.span_id, "big"),
        trace_id=int.from_bytes(exemplar.trace_id, "big"),
    )
