"""Prometheus metrics across processes: one registry per process, merged into one exposition per service.

A service consists of several processes behind one port, and a scrape must show all of them, whichever process answers.
Therefore each process reports its registry as `MetricFamily` messages, and the answering process merges them with
`render_families`.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protos.quire.link.v1 import link_pb2

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def collect_families(registry: CollectorRegistry, **labels: str) -> list[link_pb2.MetricFamily]:
    """Return the registry's current values, with the given labels added to each sample."""
    return [
        link_pb2.MetricFamily(
            name=metric.name,
            help=metric.documentation,
            type=metric.type,
            samples=[
                link_pb2.MetricSample(name=sample.name, labels={**sample.labels, **labels}, value=sample.value)
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ],
        )
        for metric in registry.collect()
    ]


def render_families(families: Iterable[link_pb2.MetricFamily]) -> bytes:
    """Return the text exposition of families from any number of processes, merged by name."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[link_pb2.MetricFamily]) -> None:
        self._metrics: dict[str, Metric] = {}
        for family in families:
            metric = self._metrics.setdefault(family.name, Metric(family.name, family.help, family.type))
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)

    def collect(self) -> Iterable[Metric]:
        return self._metrics.values()
