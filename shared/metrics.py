"""Metrics of several processes: each process has a registry, and all are merged into one exposition per service.

A service consists of several processes behind one port, and a scrape of any process must return all processes' metrics.
Each process therefore reports its registry as `MetricFamily` messages, and the scraped process merges them with
`render_families`.

Values are observed for every message, for which a client library with locks is too slow (1.5 µs). No locks are needed
here, because only the event loop of the process writes values.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from protos.quire.link.v1 import link_pb2
from shared.metric_names import Kind, Metric

LabelValues = tuple[str, ...]


class SpanRef(NamedTuple):
    """Reference to a sampled span, for an exemplar."""

    trace_id: bytes
    span_id: bytes


def span_ref(span: Span) -> SpanRef | None:
    """Return a reference to a span; None if it is not sampled."""
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return SpanRef(context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


class Values:
    """Values of a counter or gauge by label values."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._values: dict[LabelValues, float] = {} if metric.labels else {(): 0.0}

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Add to the value with these labels."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *labels: str) -> None:
        """Replace the value with these labels."""
        self._values[labels] = value

    def family(self) -> link_pb2.MetricFamily:
        return make_family(self.metric, self._values.items())


class Histogram:
    """Histogram by label values. Each bucket stores its newest observation from a sampled trace as its exemplar."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._series: dict[LabelValues, Distribution] = {}
        if not metric.labels:
            self.labels()

    def labels(self, *labels: str) -> "Distribution":
        """Return the distribution with these labels."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Distribution(self.metric.bounds)
        return series

    def forget(self, label: str, value: str) -> None:
        """Drop the distributions with this value of a label."""
        index = self.metric.labels.index(label)
        self._series = {key: series for key, series in self._series.items() if key[index] != value}

    def in_parts(self) -> Iterator[link_pb2.MetricFamily | None]:
        """Yield None after each series, and at the end the current values: cumulative buckets, sum and count."""
        metric = self.metric
        name = metric.prometheus_name
        family = _empty_family(metric)
        for values, series in list(self._series.items()):
            labels = label_set(metric, values)
            for le, count, exemplar in series.cumulative():
                sample = family.samples.add(name=f"{name}_bucket", labels={**labels, "le": le}, value=count)
                if exemplar is not None:
                    sample.exemplar.CopyFrom(exemplar)
            family.samples.add(name=f"{name}_count", labels=labels, value=series.count)
            family.samples.add(name=f"{name}_sum", labels=labels, value=series.sum)
            yield None
        yield family


class Distribution:
    """Counts of one series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: dict[int, tuple[float, int, SpanRef]] = {}
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def observe(self, value: float, count: int = 1, span: SpanRef | None = None) -> None:
        """Add one value, `count` times; `span` is the sampled span in which it was observed."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += count
        self.sum += value * count
        if span is not None:
            self._exemplars[index] = (value, time.time_ns(), span)

    def cumulative(self) -> Iterator[tuple[str, int, link_pb2.Exemplar | None]]:
        """Yield the buckets: upper bound, number of values up to it, exemplar."""
        total = 0
        for index, count in enumerate(self._counts):
            total += count
            found = self._exemplars.get(index)
            exemplar = None
            if found is not None:
                value, unix_ns, span = found
                exemplar = link_pb2.Exemplar(value=value, unix_ns=unix_ns, trace_id=span.trace_id, span_id=span.span_id)
            yield f"{self._bounds[index]:g}" if index < len(self._bounds) else "+Inf", total, exemplar


class Registry:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._all: list[Values | Histogram] = []
        self._computed: list[tuple[Metric, Callable[[], float], LabelValues]] = []

    def values(self, metric: Metric) -> Values:
        """Return the values of a new counter or gauge."""
        made = Values(metric)
        self._all.append(made)
        return made

    def histogram(self, metric: Metric) -> Histogram:
        made = Histogram(metric)
        self._all.append(made)
        return made

    def computed(self, metric: Metric, value: Callable[[], float], *labels: str) -> None:
        """Add a counter or gauge whose value is read when it is reported."""
        self._computed.append((metric, value, labels))

    def families(self, **labels: str) -> list[link_pb2.MetricFamily]:
        """Return the current values of all metrics, with the given labels added to each sample."""
        families = [family for family in self.in_parts() if family is not None]
        for family in families if labels else ():
            for sample in family.samples:
                sample.labels.update(labels)
        return families

    def in_parts(self) -> Iterator[link_pb2.MetricFamily | None]:
        """Yield the current values of all metrics. None is yielded after each part of a long family."""
        for each in self._all:
            if isinstance(each, Histogram):
                yield from each.in_parts()
            else:
                yield each.family()
        for metric, read, values in self._computed:
            yield make_family(metric, [(values, read())])


def make_family(metric: Metric, values: Iterable[tuple[LabelValues, float]]) -> link_pb2.MetricFamily:
    """Return a counter or gauge with values by their labels."""
    family = _empty_family(metric)
    name = metric.prometheus_name + ("_total" if metric.kind is Kind.COUNTER else "")
    for labels, value in values:
        family.samples.add(name=name, labels=label_set(metric, labels), value=value)
    return family


def label_set(metric: Metric, values: LabelValues) -> dict[str, str]:
    """Return the labels in Prometheus's form, without empty labels."""
    return {name.replace(".", "_"): value for name, value in zip(metric.labels, values, strict=True) if value}


def render_families(families: Iterable[link_pb2.MetricFamily], accept: str = "") -> tuple[bytes, str]:
    """Return the exposition of families from any number of processes, merged by name, and its content type.

    Args:
        families: the families.
        accept: the Accept header. Exemplars are included only in OpenMetrics format.
    """
    registry = CollectorRegistry()
    registry.register(_Families(families))
    if "application/openmetrics-text" in accept:
        # No name needs UTF-8, and the other escaping schemes would replace the colon in `vllm:` names.
        text: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Families(Collector):
    def __init__(self, families: Iterable[link_pb2.MetricFamily]) -> None:
        self._metrics: dict[str, PrometheusMetric] = {}
        for family in families:
            metric = self._metrics.setdefault(
                family.name, PrometheusMetric(family.name, family.help, family.type, family.unit)
            )
            for sample in family.samples:
                exemplar = _exemplar(sample.exemplar) if sample.HasField("exemplar") else None
                metric.add_sample(sample.name, dict(sample.labels), sample.value, exemplar=exemplar)

    def collect(self) -> Iterable[PrometheusMetric]:
        return self._metrics.values()


def _exemplar(exemplar: link_pb2.Exemplar) -> Exemplar:
    ids: Mapping[str, str] = {"trace_id": exemplar.trace_id.hex(), "span_id": exemplar.span_id.hex()}
    return Exemplar(dict(ids), exemplar.value, exemplar.unix_ns / 1e9)


def _empty_family(metric: Metric) -> link_pb2.MetricFamily:
    return link_pb2.MetricFamily(
        name=metric.prometheus_name, help=metric.help, type=metric.kind.value, unit=metric.prometheus_unit
    )
