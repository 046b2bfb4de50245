"""Traces across processes, as a real OTLP receiver sees them."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import Client, SchedulingOptions
from tests.e2e.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver

GENERATE = "quire.v1.GenerationService/Generate"
REQUEST_SPANS = {"quire.queue", "quire.attempt", "quire.prefill", "quire.decode", "quire.worker.row"}
PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def traced(checkpoint: Path) -> Iterator[tuple[Served, OtlpReceiver]]:
    """Return a service that traces all steps of sampled requests, and its span receiver."""
    with otlp_receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serve(checkpoint, "--num-threads=1", "--trace-steps=1", environ=environ) as served:
            yield served, receiver


def test_one_trace_across_three_processes_and_links_both_ways(traced: tuple[Served, OtlpReceiver]) -> None:
    """The client's span is the root of spans from three processes, which are linked to the step traces.

    The links go both ways. No span contains a part of the prompt.
    """
    served, receiver = traced
    tracer = TracerProvider().get_tracer("client")
    with Client(served.grpc) as client, tracer.start_as_current_span("client") as root:
        client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).result()
    context = root.get_span_context()
    trace_id = context.trace_id.to_bytes(16, "big")

    def complete(spans: list[ReceivedSpan]) -> bool:
        mine = {span.name: span for span in spans if span.span.trace_id == trace_id}
        return mine.keys() >= REQUEST_SPANS and GENERATE in mine and len(_steps_of(mine["quire.attempt"], spans)) == 16

    spans = receiver.wait_for(complete)
    request = [span for span in spans if span.span.trace_id == trace_id]
    assert len({span.pid for span in request}) == 3
    _assert_one_tree(request, context.span_id.to_bytes(8, "big"))

    by_id = {span.span.span_id: span for span in spans}
    (attempt,) = (span for span in request if span.name == "quire.attempt")
    (row,) = (span for span in request if span.name == "quire.worker.row")
    mine = _steps_of(attempt, spans)
    steps = [span for span in mine if span.name == "quire.step"]
    worker_steps = [span for span in mine if span.name == "quire.worker.step"]
    assert len(steps) == len(worker_steps) == 8, "eight tokens are eight steps"
    assert attempt.linked == {step.span.span_id for step in steps}
    assert all(attempt.span.span_id in step.linked for step in steps)
    assert row.linked == {step.span.span_id for step in worker_steps}
    assert all(by_id[step.span.parent_span_id].name == "quire.step" for step in worker_steps)
    assert all(step.span.trace_id != trace_id for step in steps), "a step's trace is its own"
    assert PROMPT not in str(spans)


def test_untraced_requests_make_no_spans_elsewhere(traced: tuple[Served, OtlpReceiver]) -> None:
    """A request whose client's trace is not sampled makes no span in any process."""
    served, receiver = traced
    unsampled = trace.NonRecordingSpan(trace.SpanContext(trace_id=7, span_id=9, is_remote=False))
    sampled = trace.NonRecordingSpan(
        trace.SpanContext(trace_id=8, span_id=9, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    with Client(served.grpc) as client:
        for parent in (unsampled, sampled):
            with trace.use_span(parent):
                client.generate("a", max_tokens=2, ignore_eos=True).result()
    spans = receiver.wait_for(lambda spans: any(_trace_id(span) == 8 and span.name == GENERATE for span in spans))
    traces = {_trace_id(span) for span in spans}
    assert 7 not in traces
    assert 8 in traces


def test_a_request_that_missed_its_target_is_traced_although_it_was_not_sampled(checkpoint: Path) -> None:
    """Its spans come from the front end and the scheduler, in one ordered tree; a request in time has none."""
    with otlp_receiver() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        with serve(checkpoint, "--num-threads=1", environ=environ) as served, Client(served.grpc) as client:
            client.generate("a", max_tokens=2, ignore_eos=True, request_id="in-time").result()
            late = SchedulingOptions(ttft_target_s=1e-6)
            client.generate(PROMPT, max_tokens=4, ignore_eos=True, request_id="late", scheduling=late).result()
            spans = receiver.wait_for(lambda spans: {"quire.decode", GENERATE} <= {span.name for span in spans})
    by_name = {span.name: span for span in spans}
    call, attempt = by_name[GENERATE], by_name["quire.attempt"]

    assert len(by_name) == len(spans)
    assert set(by_name) == {GENERATE, "quire.tokenize", "quire.queue", "quire.attempt", "quire.prefill", "quire.decode"}
    assert len({span.span.trace_id for span in spans}) == 1
    assert len({span.pid for span in spans}) == 2
    for name, parent in (
        ("quire.tokenize", call),
        ("quire.queue", call),
        ("quire.attempt", call),
        ("quire.prefill", attempt),
        ("quire.decode", attempt),
    ):
        assert by_name[name].span.parent_span_id == parent.span.span_id, name
    assert not call.span.parent_span_id
    assert call.attributes["quire.tail"] == "target"
    assert call.attributes["quire.request_id"] == attempt.attributes["quire.request_id"] == "late"
    assert attempt.attributes["quire.outcome"] == "length"
    phases = [by_name[name].span for name in ("quire.tokenize", "quire.queue", "quire.prefill", "quire.decode")]
    assert [each.start_time_unix_nano for each in phases] == sorted(each.start_time_unix_nano for each in phases)
    assert all(each.end_time_unix_nano <= call.span.end_time_unix_nano for each in phases[:3])


def test_an_exemplar_leads_to_the_step_and_its_neighbours(traced: tuple[Served, OtlpReceiver]) -> None:
    """From a bucket of a latency to the request's trace, from there to a step, and from the step to its neighbours.

    Every hop uses only what the hop before gave: ids in the exemplar, and links of spans.
    """
    served, receiver = traced
    parents = [
        trace.NonRecordingSpan(
            trace.SpanContext(trace_id=each, span_id=9, is_remote=False, trace_flags=trace.TraceFlags(1))
        )
        for each in (21, 22)
    ]
    with Client(served.grpc) as client, ThreadPoolExecutor(2) as together:

        def generate(parent: trace.Span) -> None:
            with trace.use_span(parent):
                client.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True).result()

        list(together.map(generate, parents))
    page = served.metrics(accept="application/openmetrics-text;version=1.0.0")
    ended = {("quire.attempt", 21), ("quire.attempt", 22), (GENERATE, 21), (GENERATE, 22)}
    spans = receiver.wait_for(lambda spans: ended <= {(span.name, _trace_id(span)) for span in spans})
    # The bucket's exemplar links to the request's trace and to the span of the call.
    families = {each.name: each for each in text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]
    buckets = families["gen_ai_server_time_to_first_token_seconds"].samples
    exemplars = [each.exemplar for each in buckets if each.exemplar is not None]
    exemplar = next(each for each in exemplars if int(each.labels["trace_id"], 16) in (21, 22))
    by_id = {span.span.span_id: span for span in spans}
    call = by_id[bytes.fromhex(exemplar.labels["span_id"])]
    assert call.name == GENERATE
    assert _trace_id(call) == int(exemplar.labels["trace_id"], 16)
    # The call links to its attempt, and the attempt to the steps in which it ran.
    (attempt,) = [
        span for span in spans if span.name == "quire.attempt" and span.span.parent_span_id == call.span.span_id
    ]
    steps = [by_id[link] for link in attempt.linked]
    assert {step.name for step in steps} == {"quire.step"}
    # A step links to the attempts of all its requests, one of which is the neighbour's.
    neighbours = {by_id[link].span.trace_id for step in steps for link in step.linked}
    assert {int.from_bytes(each, "big") for each in neighbours} == {21, 22}


@pytest.mark.every(3)
def test_a_collector_that_is_down_costs_only_spans(checkpoint: Path) -> None:
    """Requests are served and the service ends in time although no collector listens; the lost spans are counted."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{nobody.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_BSP_MAX_QUEUE_SIZE": "8",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "always_on",
        }
        with serve(checkpoint, "--num-threads=1", environ=environ) as served, Client(served.grpc) as client:
            for _ in range(10):
                answer = client.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).result()
                assert len(answer.token_ids) == 4
            while not (
                served.metric("quire_spans_dropped_total", process="frontend")
                and served.metric("quire_spans_dropped_total", process="scheduler")
            ):
                client.generate(PROMPT, max_tokens=4, ignore_eos=True).result()


@pytest.mark.every(3)
def test_a_collector_that_hangs_costs_only_spans(checkpoint: Path) -> None:
    """Requests are served although a collector accepts connections and never responds; lost spans are counted.

    The service ends, with success and in the harness' time, while an export would wait for an hour.
    """
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)  # The kernel accepts connections, but no process reads.
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3600",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "OTEL_BSP_MAX_QUEUE_SIZE": "8",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "always_on",
        }
        with serve(checkpoint, "--num-threads=1", environ=environ) as served, Client(served.grpc) as client:
            while not (
                served.metric("quire_spans_dropped_total", process="frontend")
                and served.metric("quire_spans_dropped_total", process="scheduler")
            ):
                answer = client.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True).result()
                assert len(answer.token_ids) == 4


def _steps_of(attempt: ReceivedSpan, spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """Return the scheduler's and the worker's spans for the steps of an attempt."""
    steps = [span for span in spans if span.name == "quire.step" and attempt.span.span_id in span.linked]
    ids = {step.span.span_id for step in steps}
    return [*steps, *(s for s in spans if s.name == "quire.worker.step" and s.span.parent_span_id in ids)]


def _trace_id(span: ReceivedSpan) -> int:
    return int.from_bytes(span.span.trace_id, "big")


def _assert_one_tree(spans: list[ReceivedSpan], root: bytes) -> None:
    known = {span.span.span_id for span in spans} | {root}
    orphans = [span.name for span in spans if span.span.parent_span_id not in known]
    assert not orphans, f"spans without their parent: {orphans}"
