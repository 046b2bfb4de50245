"""Prometheus metrics that cross a process: one registry per process, merged into one exposition per service.

A scheduler service is several processes behind one port; whichever process answers a scrape must show all of them.
So each process reports its registry as `MetricFamily` messages, and whoever answers merges the reports with
`render_families`.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protos.quire.link.v1 import link_pb2

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def collect_families(registry: CollectorRegistry, **labels: str) -> list[link_pb2.MetricFamily]:
    """The registry's present values, each sample with the given labels added."""
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
    """The text exposition of families from any number of processes; families of one name become one."""
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
