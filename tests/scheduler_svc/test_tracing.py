"""Which steps get a trace of their own."""

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.tracing import SchedulerTracing
from shared.request_spec import RequestSpec
from shared.telemetry import Telemetry

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NO_ROWS = np.zeros(0, np.intp)


class KeptTelemetry(Telemetry):
    """Keeps finished spans instead of exporting them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.exports = True
        self.tracer = self.forced_tracer = provider.get_tracer("test")


def make_plan(step: int) -> Plan:
    """The first one admits the traced request; it takes part in all."""
    admission = RowAdmission(
        row=0,
        generation=1,
        spec=RequestSpec(request_id="request", num_prompt_tokens=3, max_tokens=9, traceparent=TRACEPARENT),
        token_ids=np.ones(3, np.int32),
        num_computed_tokens=0,
        blocks=np.zeros(1, np.intp),
        frontend=b"frontend",
        stream=1,
        attempt=0,
        queued_since=0.0,
    )
    return Plan(
        worker=b"worker",
        epoch=7,
        step=step,
        leaves=NO_ROWS,
        admissions=(admission,) if step == 1 else (),
        append_rows=NO_ROWS,
        append_blocks=NO_ROWS,
        chunk_rows=NO_ROWS,
        chunk_lengths=NO_ROWS,
        holds=NO_ROWS,
        releases=NO_ROWS,
        num_decodes=1,
        num_tokens=1,
        traced_rows=((b"frontend", 1),),
    )


def traced_steps(trace_steps: float, num_steps: int) -> list[int]:
    """Return which of a number of steps with one traced request get a span; the worker is notified of each."""
    telemetry = KeptTelemetry()
    tracing = SchedulerTracing(telemetry, 0, trace_steps)
    told = []
    for step in range(1, num_steps + 1):
        traceparent, _ = tracing.plan_issued(make_plan(step), float(step))
        tracing.step_answered(b"worker", 7, step, step + 0.5)
        if traceparent:
            told.append(step)
    spans = [span for span in telemetry.exporter.get_finished_spans() if span.name == "quire.step"]
    assert [span.attributes["quire.step"] for span in spans if span.attributes] == told
    return told


@pytest.mark.parametrize(
    ("share", "steps"),
    [
        (1.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (0.5, [1, 3, 5, 7, 9]),
        (0.25, [1, 5, 9]),
        (0.0, []),
    ],
)
def test_a_share_of_the_steps_is_traced(share: float, steps: list[int]) -> None:
    """The first step and then every so manieth, evenly; none at 0."""
    assert traced_steps(share, 10) == steps


def test_any_share_is_kept_in_the_long_run() -> None:
    """Within one step of the share, however long."""
    for share in (0.1, 1 / 3, 0.77):
        assert abs(len(traced_steps(share, 1000)) - 1000 * share) <= 1
