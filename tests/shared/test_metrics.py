"""Metrics: exact buckets of the conventions, exposition in both formats, and the same values by OTLP."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import Empty, Queue
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from shared import metric_names as names
from shared.metrics import Registry, SpanRef, render_families
from shared.otlp_metrics import Families
from shared.telemetry import Telemetry

SPAN = SpanRef(bytes(range(16)), bytes(range(8)))


@pytest.mark.parametrize(
    ("metric", "bounds"),
    [
        (
            names.REQUEST_DURATION,
            (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
        ),
        (
            names.TIME_TO_FIRST_TOKEN,
            (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
        ),
        (names.TIME_PER_OUTPUT_TOKEN, (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)),
        (names.RPC_DURATION, (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)),
    ],
)
def test_standard_metrics_have_the_buckets_of_the_conventions(metric: names.Metric, bounds: tuple[float, ...]) -> None:
    """A standard name has its convention's bounds, so that services can be compared."""
    assert metric.bounds == bounds
    assert metric.unit == "s"


def test_every_name_is_valid_and_unique() -> None:
    """No two metrics share a name on /metrics, and every histogram has ascending bounds."""
    shown = [each.prometheus_name for each in names.ALL]

    assert len(set(shown)) == len(shown)
    for each in names.ALL:
        assert (each.kind is names.Kind.HISTOGRAM) == bool(each.bounds)
        assert list(each.bounds) == sorted(set(each.bounds))


def test_metrics_can_be_computed_in_parts() -> None:
    """Each series of a histogram is a part, so a loop can do other work in between; the values are the same."""
    registry = _registry()
    histogram = registry.histogram(names.STEP)
    for number in range(3):
        histogram.labels(f"w{number}").observe(0.1)

    parts = list(registry.in_parts())

    families = [family for family in parts if family is not None]
    assert families == registry.families()
    assert len(parts) >= len(families) + 3


def test_both_formats_show_the_same_values() -> None:
    """OpenMetrics has the values of Prometheus's text, under the same names, and in addition the exemplars."""
    registry = _registry()
    families = registry.families(frontend="f")
    text, plain_type = render_families(families)
    found, open_type = render_families(families, "application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    parsed = {each.name: each for each in text_string_to_metric_families(found.decode())}  # type: ignore[no-untyped-call]

    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    without_exemplars = {line.partition(" # ")[0] for line in found.decode().splitlines() if line[0] != "#"}
    assert without_exemplars == {line for line in text.decode().splitlines() if line[0] != "#"}
    first = parsed["vllm:time_to_first_token_seconds"]
    assert {each.labels["le"]: each.value for each in first.samples if "le" in each.labels}["0.01"] == 3
    (exemplar,) = [each.exemplar for each in first.samples if each.exemplar is not None]
    assert exemplar.value == 0.25
    assert exemplar.labels == {"trace_id": SPAN.trace_id.hex(), "span_id": SPAN.span_id.hex()}


def test_metrics_are_pushed_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector gets OpenTelemetry's names, units and attributes, with exemplars, and no name of another server."""
    with metrics_receiver() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
        telemetry = Telemetry("quire-test")
        registry = _registry()
        found = _pushed(telemetry, registry.families, received)
        telemetry.shutdown(registry.families())
    by_name = {each.name: each for each in found}

    assert set(by_name) == {"gen_ai.server.time_to_first_token", "quire.workers", "quire.merged_tokens"}
    first = by_name["gen_ai.server.time_to_first_token"]
    (point,) = first.histogram.data_points
    assert first.unit == "s"
    assert list(point.explicit_bounds) == list(names.TIME_TO_FIRST_TOKEN.bounds)
    assert sum(point.bucket_counts) == point.count == 4
    assert point.sum == pytest.approx(0.265)
    assert {each.key: each.value.string_value for each in point.attributes} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "m",
    }
    assert [each.trace_id for each in point.exemplars] == [SPAN.trace_id]
    assert by_name["quire.merged_tokens"].sum.is_monotonic
    assert by_name["quire.workers"].gauge.data_points[0].as_double == 2


def test_an_exporter_that_cannot_be_created_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process goes on without the export of its metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zip")
    telemetry = Telemetry("quire-test")
    for _ in range(3):
        telemetry.push_metrics(list)
    telemetry.shutdown()

    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("metrics are not exported") == 1


def test_an_export_that_fails_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exporter exception ends neither the process nor the metric export, and is logged once."""
    export, calls = OTLPMetricExporter.export, itertools.count()

    def fail_twice(*arguments: Any) -> Any:
        if next(calls) < 2:
            raise RuntimeError("planted")
        return export(*arguments)

    with metrics_receiver() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1")
        monkeypatch.setattr(OTLPMetricExporter, "export", fail_twice)
        telemetry = Telemetry("quire-test")
        registry = _registry()
        found = _pushed(telemetry, registry.families, received)
        telemetry.shutdown()

    assert "quire.workers" in {each.name for each in found}
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("an export of metrics failed") == 1


def _pushed(
    telemetry: Telemetry, families: Callable[[], Families], received: "Queue[list[metrics_pb2.Metric]]"
) -> list[metrics_pb2.Metric]:
    """The first metrics that a process exports whose loop calls `push_metrics` often."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        telemetry.push_metrics(families)
        with suppress(Empty):
            return received.get(timeout=0.01)
    raise TimeoutError("no metrics came")


def _registry() -> Registry:
    registry = Registry()
    for metric, labels in (
        (names.TIME_TO_FIRST_TOKEN, ("chat", "quire", "m")),
        (names.VLLM_TIME_TO_FIRST_TOKEN, ("m",)),
    ):
        series = registry.histogram(metric).labels(*labels)
        series.observe(0.005, 3)
        series.observe(0.25, span=SPAN)
    registry.values(names.MERGED_TOKENS).add(7)
    registry.values(names.WORKERS).set(2)
    return registry


class _Receiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, received: "Queue[list[metrics_pb2.Metric]]") -> None:
        self._received = received

    def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self._received.put(list(scope.metrics))
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def metrics_receiver() -> Iterator[tuple[str, "Queue[list[metrics_pb2.Metric]]"]]:
    """A metrics collector: its endpoint, and each export's metrics."""
    received: Queue[list[metrics_pb2.Metric]] = Queue()
    server = grpc.server(ThreadPoolExecutor(2))
    add = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add(_Receiver(received), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        server.stop(1).wait()
