"""The environment variables of OpenTelemetry mean what OpenTelemetry's documentation says."""

import os

import pytest

from shared.config import ConfigError
from shared.telemetry import Telemetry, exporting
from tests.e2e.otlp_receiver import ReceivedSpan, otlp_receiver

GRPC_ONLY = "is not supported; use grpc (port 4317 of the collector)"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


@pytest.mark.parametrize(
    ("environ", "exports"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": ""}, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, False),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        (
            ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            True,
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, False),
    ],
)
def test_when_spans_are_exported(environ: dict[str, str], exports: bool) -> None:
    """An endpoint enables export, a given exporter name decides, and disabled means disabled.

    Unused variables are not checked. The variable for traces overrides the one for all signals.
    """
    assert exporting(environ) is exports


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            f"OTEL_EXPORTER_OTLP_PROTOCOL: 'http/protobuf' {GRPC_ONLY}",
        ),
        (
            ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'http/json' {GRPC_ONLY}",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp,zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin' is not supported; use otlp or none"),
    ],
)
def test_an_unsupported_variable_is_named(environ: dict[str, str], line: str) -> None:
    """An exporter that Quire lacks is reported in one line with the variable and the remedy."""
    with pytest.raises(ConfigError) as raised:
        exporting(environ)

    assert str(raised.value) == line


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_BSP_MAX_QUEUE_SIZE",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
        "OTEL_BSP_SCHEDULE_DELAY",
    ],
)
def test_a_number_that_is_not_valid_is_an_error_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a number ends no process later; an empty value means the default, and an unused one is not checked."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    for text in ("5s", "0", "-1", "nan"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ConfigError, match=f"^{name}: '{text}' is not a positive number; set a whole number"):
            Telemetry("quire-test")

    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    Telemetry("quire-test").shutdown()
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.setenv(name, "")
    Telemetry("quire-test").shutdown()


def test_a_queue_may_be_smaller_than_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of one span takes one span."""
    with otlp_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
        telemetry = Telemetry("quire-test")
        telemetry.tracer.start_span("one").end()
        telemetry.shutdown()
        receiver.wait_for(lambda spans: [span.name for span in spans] == ["one"])

    assert telemetry.spans_dropped == 0


def test_a_wrong_variable_of_the_exporter_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported in one line."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "zip")
    with pytest.raises(ConfigError, match=r"^OTEL_EXPORTER_OTLP_\*: .*; correct the variables of the exporter$"):
        Telemetry("quire-test")


@pytest.mark.parametrize(
    ("environ", "service", "attributes"),
    [
        ({}, "quire-test", {}),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine", {}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,deployment.environment.name=a%20b"},
            "theirs",
            {"deployment.environment.name": "a b"},
        ),
        ({"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs"}, "mine", {}),
    ],
)
def test_the_environment_names_the_service(
    environ: dict[str, str], service: str, attributes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's name for a service overrides the process's own; a collector sees it, and the pid."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with otlp_receiver() as receiver:
        for name, value in (environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}).items():
            monkeypatch.setenv(name, value)
        telemetry = Telemetry("quire-test")
        telemetry.tracer.start_span("one").end()
        telemetry.shutdown()

        def arrived(spans: list[ReceivedSpan]) -> bool:
            return [span.name for span in spans] == ["one"]

        (span,) = receiver.wait_for(arrived)

    assert (span.service, span.pid) == (service, os.getpid())
    assert attributes.items() <= span.resource.items()
