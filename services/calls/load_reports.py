"""ORCA load reports: adds the load of the service to responses, for load balancers (`--load-reports`).

gRPC carries `xds.data.orca.v3.OrcaLoadReport` in the trailer `endpoint-load-metrics-bin`. HTTP carries the same numbers
in the header `endpoint-load-metrics`, as `TEXT name=value,...`. The request header `endpoint-load-metrics-format` may
select `JSON {...}` or `endpoint-load-metrics-bin` instead. The metrics have vLLM's names. They describe the whole cell,
not one front end, and are at most one second old.
"""

import base64
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from protos.quire.link.v1 import link_pb2

TRAILER = "endpoint-load-metrics-bin"
HEADER = "endpoint-load-metrics"
FORMAT_HEADER = "endpoint-load-metrics-format"

_APPLICATION_UTILIZATION = 9
"""Number of the field in OrcaLoadReport: a double."""
_NAMED_METRICS = 8
"""Number of the field in OrcaLoadReport: a map from string to double."""
_WIRE_64_BIT, _WIRE_BYTES = 1, 2


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of the service at one time."""

    running: float
    waiting: float
    kv_usage: float
    """Share of the KV blocks that requests hold, 0 to 1."""

    @property
    def utilization(self) -> float:
        """Share of the capacity in use; above 1 while requests wait."""
        return self.kv_usage if not self.waiting else 1 + self.waiting / max(self.running, 1)

    def named_metrics(self) -> dict[str, float]:
        """Return the metrics under vLLM's names."""
        return {
            "kv_cache_usage_perc": self.kv_usage,
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
        }

    def to_bytes(self) -> bytes:
        """Return the report as a serialised OrcaLoadReport."""
        parts = [
            _field(_NAMED_METRICS, _field(1, name.encode()) + _double(2, value))
            for name, value in self.named_metrics().items()
        ]
        return b"".join(parts) + _double(_APPLICATION_UTILIZATION, self.utilization)

    def header(self, wanted: str) -> tuple[str, str]:
        """Return the name and value of the HTTP header in the format TEXT (the default), JSON or BIN."""
        match wanted.strip().upper():
            case "JSON":
                report = {"application_utilization": self.utilization, "named_metrics": self.named_metrics()}
                return HEADER, "JSON " + json.dumps(report)
            case "BIN":
                return TRAILER, base64.b64encode(self.to_bytes()).decode()
            case _:
                figures = [f"named_metrics.{name}={value:g}" for name, value in self.named_metrics().items()]
                return HEADER, "TEXT " + ",".join([f"application_utilization={self.utilization:g}", *figures])


def to_report(families: Iterable[link_pb2.MetricFamily]) -> LoadReport:
    """Return the report of a service with these metrics."""
    values: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return LoadReport(
        running=values.get("vllm:num_requests_running", 0.0),
        waiting=values.get("vllm:num_requests_waiting", 0.0),
        kv_usage=values.get("vllm:kv_cache_usage_perc", 0.0),
    )


class LoadReports:
    """Holds the front end's newest report. There is none before the scheduler has responded, or if reports are off."""

    def __init__(self) -> None:
        """Start without a report."""
        self.newest: LoadReport | None = None


def _field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, shorter than 128."""
    assert len(content) < 128
    return bytes((number << 3 | _WIRE_BYTES, len(content))) + content


def _double(number: int, value: float) -> bytes:
    return bytes((number << 3 | _WIRE_64_BIT,)) + struct.pack("<d", value)
