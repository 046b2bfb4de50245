"""Parses metrics in the Prometheus text format, and computes how counters changed between two scrapes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape of all metrics."""

    values: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum over all samples with this name and these labels."""
        return sum(
            value for (each, own), value in self.values.items() if each == name and labels.items() <= dict(own).items()
        )

    def increase(self, name: str, before: "Scrape", **labels: str) -> float:
        """Return the increase of counters with these labels since `before`, summed.

        Counters are treated as in Prometheus: a decreased counter was reset, a new counter may have existed before, and
        a missing counter does not reduce the sum.
        """
        return sum(
            value - then if value >= then else value
            for (each, own), value in self.values.items()
            if each == name
            and labels.items() <= dict(own).items()
            and (then := before.values.get((each, own))) is not None
        )

    def labels(self, name: str, label: str) -> list[str]:
        """Return the values of one label in a metric."""
        return sorted({dict(own)[label] for each, own in self.values if each == name and label in dict(own)})


def parse(text: str) -> Scrape:
    """Parse the text of /metrics."""
    return Scrape(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
