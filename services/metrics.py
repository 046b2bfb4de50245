"""Metrics of the front end. Help texts document names and labels.

Latencies are observed for every message, too often for prometheus_client's histogram with its lock (1.5 µs). The event
loop is the only writer, so a histogram without a lock suffices.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from protos.quire.link.v1 import link_pb2
from shared.metrics import collect_families

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)


class LoopHistogram(Collector):
    """Histogram with a single writer thread."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._help = name, help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Add one value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the cumulative buckets, in Prometheus's form."""
        family = HistogramMetricFamily(self._name, self._help)
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        family.add_metric([], buckets, self._sum)
        yield family


class FrontendMetrics:
    """Metrics registry of one front-end process."""

    def __init__(self, frontend_id: str, malformed_messages: Callable[[], int]) -> None:
        self._frontend_id = frontend_id
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "quire_requests", "Finished RPCs, by method and gRPC status code", ["method", "code"], registry=registry
        )
        self.first_token = LoopHistogram(
            "quire_time_to_first_token_seconds",
            "Time from arrival to the first token, seconds",
            _FIRST_TOKEN_BUCKETS,
            registry,
        )
        self.token_gap = LoopHistogram(
            "quire_inter_token_latency_seconds",
            "Time between two output tokens of one stream, seconds; 0 between tokens of one message",
            _GAP_BUCKETS,
            registry,
        )
        self.duration = LoopHistogram(
            "quire_request_duration_seconds",
            "Time from arrival to the last message, seconds",
            _DURATION_BUCKETS,
            registry,
        )
        self.prompt_tokens = Counter("quire_prompt_tokens", "Tokens of submitted prompts", registry=registry)
        self.generation_tokens = Counter("quire_generation_tokens", "Tokens sent to clients", registry=registry)
        self.merged_tokens = Counter(
            "quire_merged_tokens", "Tokens that shared a message because the client read slowly", registry=registry
        )
        self.live_streams = Gauge("quire_live_streams", "Generate calls in progress", registry=registry)
        malformed = Gauge(
            "quire_malformed_link_messages",
            "Malformed messages of the scheduler core that were dropped",
            registry=registry,
        )
        malformed.set_function(malformed_messages)

    def count_outcome(self, method: str, code: str) -> None:
        """Count one finished RPC."""
        self._requests.labels(method, code).inc()

    def families(self) -> list[link_pb2.MetricFamily]:
        """Return the current values, labelled with the front end's name."""
        return collect_families(self._registry, frontend=self._frontend_id)
