"""Traces across processes, as a real OTLP receiver sees them."""

from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from quire import Client
from tests.checkpoints import make_checkpoint
from tests.e2e.harness import serve
from tests.e2e.otlp_receiver import ReceivedSpan, otlp_receiver

REQUEST_SPANS = {"quire.queue", "quire.attempt", "quire.prefill", "quire.decode", "quire.worker.row"}
PROMPT = "the quick brown fox"


def test_one_trace_across_three_processes_and_links_both_ways(tmp_path: Path) -> None:
    """The client's span is the root of spans from three processes, which are linked with the traces of the steps.

    The links go both ways. No span contains a part of the prompt.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    tracer = TracerProvider().get_tracer("client")
    with otlp_receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serve(checkpoint, "--num-threads=1", environ=environ) as served:
            with Client(served.grpc) as client, tracer.start_as_current_span("client") as root:
                client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).result()
            context = root.get_span_context()
            trace_id = context.trace_id.to_bytes(16, "big")

            def complete(spans: list[ReceivedSpan]) -> bool:
                mine = {span.name for span in spans if span.span.trace_id == trace_id}
                steps = [span for span in spans if span.name in ("quire.step", "quire.worker.step")]
                return mine >= REQUEST_SPANS and len(steps) >= 16 and any("Generate" in name for name in mine)

            spans = receiver.wait_for(complete)
    request = [span for span in spans if span.span.trace_id == trace_id]
    assert len({span.pid for span in request}) == 3
    _assert_one_tree(request, context.span_id.to_bytes(8, "big"))

    by_id = {span.span.span_id: span for span in spans}
    (attempt,) = (span for span in request if span.name == "quire.attempt")
    (row,) = (span for span in request if span.name == "quire.worker.row")
    steps = [span for span in spans if span.name == "quire.step"]
    worker_steps = [span for span in spans if span.name == "quire.worker.step"]
    assert len(steps) == len(worker_steps) == 8, "eight tokens are eight steps"
    assert attempt.linked == {step.span.span_id for step in steps}
    assert all(attempt.span.span_id in step.linked for step in steps)
    assert row.linked == {step.span.span_id for step in worker_steps}
    assert all(by_id[step.span.parent_span_id].name == "quire.step" for step in worker_steps)
    assert all(step.span.trace_id != trace_id for step in steps), "a step's trace is its own"
    assert PROMPT not in str(spans)


def test_untraced_requests_make_no_spans_elsewhere(tmp_path: Path) -> None:
    """A request whose client's trace is not sampled makes no span in any process."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    unsampled = trace.NonRecordingSpan(trace.SpanContext(trace_id=7, span_id=9, is_remote=False))
    sampled = trace.NonRecordingSpan(
        trace.SpanContext(trace_id=8, span_id=9, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    with otlp_receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serve(checkpoint, "--num-threads=1", environ=environ) as served, Client(served.grpc) as client:
            for parent in (unsampled, sampled):
                with trace.use_span(parent):
                    client.generate("a", max_tokens=2, ignore_eos=True).result()
            spans = receiver.wait_for(lambda spans: any("Generate" in span.name for span in spans))
    traces = {int.from_bytes(span.span.trace_id, "big") for span in spans}
    assert 7 not in traces
    assert 8 in traces


def _assert_one_tree(spans: list[ReceivedSpan], root: bytes) -> None:
    known = {span.span.span_id for span in spans} | {root}
    orphans = [span.name for span in spans if span.span.parent_span_id not in known]
    assert not orphans, f"spans without their parent: {orphans}"
