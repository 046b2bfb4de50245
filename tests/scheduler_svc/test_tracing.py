"""Which steps get their own trace, and spans created from a request's history."""

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.tracing import SchedulerTracing
from shared.request_spec import RequestSpec
from shared.telemetry import Telemetry
from tests.scheduler_svc.cluster import FRONTEND, Cluster

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
    """Create plans. The first one admits the traced request, which takes part in all of them."""
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
    """Return which of several steps with one traced request get a span; the worker is notified of each."""
    telemetry = KeptTelemetry()
    tracing = SchedulerTracing(telemetry, 0, trace_steps)
    told = []
    for step in range(1, num_steps + 1):
        traceparent, _ = tracing.plan_issued(make_plan(step), "worker-0", float(step))
        tracing.step_answered(b"worker", 7, step, step + 0.5)
        if traceparent:
            told.append(step)
    spans = [span for span in telemetry.exporter.get_finished_spans() if span.name == "quire.step"]
    assert [span.attributes["quire.step"] for span in spans if span.attributes] == told
    assert {span.attributes["quire.worker"] for span in spans if span.attributes} <= {"worker-0"}
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


class TracedCluster(Cluster):
    """A cluster whose requests are traced as the service does it."""

    def __init__(self, **limits: object) -> None:
        self.telemetry = KeptTelemetry()
        self.tracing = SchedulerTracing(self.telemetry, 0, trace_steps=0.0)
        super().__init__(**limits)

    def _plan_when_due(self, peer: bytes) -> Plan | None:
        plan = super()._plan_when_due(peer)
        if plan is not None:
            self.tracing.plan_issued(plan, "w", self.now)
        return plan

    def _receive(self, effects: list[ef.Effect]) -> None:
        super()._receive(effects)
        for effect in effects:
            match effect:
                case ef.AttemptPrefilled():
                    self.tracing.attempt_prefilled((effect.frontend, effect.stream), self.now)
                case ef.AttemptEnded():
                    self.tracing.attempt_ended((effect.frontend, effect.stream), effect.outcome, self.now)

    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended since the last call."""
        found = list(self.telemetry.exporter.get_finished_spans())
        self.telemetry.exporter.clear()
        return found


def figures(spans: list[ReadableSpan], *names: str) -> set[tuple[object, ...]]:
    """What spans with these names say."""
    kept = ("quire.request_id", "quire.attempt", "quire.outcome")
    return {
        (span.name, span.start_time, span.end_time, *((span.attributes or {}).get(name) for name in kept))
        for span in spans
        if span.name in names
    }


def test_spans_from_a_history_are_those_of_a_sampled_request() -> None:
    """Waits and attempts have the same times and outcomes, including preempted requests and those of a lost worker."""
    cluster = TracedCluster(max_num_seqs=4, max_num_batched_tokens=16, policy="fcfs")
    cluster.join(ModelWorker(b"w/1", 12, 4, 8))
    for stream in range(5):
        cluster.submit(stream, list(range(1, 6 + stream)), 12, traceparent=TRACEPARENT)
    for _ in range(7):
        cluster.plan()
        cluster.answer()
    cluster.lose(b"w/1")
    cluster.join(ModelWorker(b"w/2", 12, 4, 8))
    cluster.run()
    live = cluster.spans()
    for stream in range(5):
        story = cluster.core.story(FRONTEND, stream)
        assert story is not None
        cluster.tracing.rebuild(story, TRACEPARENT, cluster.now)
    made = cluster.spans()

    outcomes = {(span.attributes or {}).get("quire.outcome") for span in live if span.name == "quire.attempt"}
    assert outcomes == {"length", "preempted", "worker lost"}
    for name in ("quire.queue", "quire.attempt"):
        assert figures(made, name) == figures(live, name)
    # After a request's first token, a history has no "prefill ended" entry.
    phases = ("quire.prefill", "quire.decode")
    assert figures(made, *phases) <= figures(live, *phases)
    assert sum(span.name == "quire.prefill" for span in made) >= 5


def test_a_request_that_was_never_admitted_has_one_wait() -> None:
    """From its arrival to its end."""
    cluster = TracedCluster()
    cluster.submit(1, [1], 1)
    began = cluster.now
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1))
    story = cluster.core.story(FRONTEND, 1)
    assert story is not None
    cluster.tracing.rebuild(story, TRACEPARENT, cluster.now + 5)
    (span,) = cluster.spans()

    assert (span.name, span.start_time, span.end_time) == ("quire.queue", int(began * 1e9), int(cluster.now * 1e9))
