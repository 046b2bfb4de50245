"""The tail rule: slow and failed calls are traced although head sampling did not choose them."""

import asyncio
from pathlib import Path

import pytest
from grpc import aio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from protos.quire.link.v1 import link_pb2
from services.calls.tracing import request_span, rpc
from services.errors import InternalError
from services.metrics import Output
from services.tail import BURST, MIN_VALUES, PER_S, TailRule, TailTracing, part_span
from tests.services.stack import TestCore, running_stack, tokens_request
from tests.services.test_tracing import PARENT_ID, TRACE_ID, KeptTelemetry

UNSAMPLED = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00")


def output(first: float = 0.1, per_token: float = 0.01, target: float | None = None) -> Output:
    """An output of eleven tokens."""
    last = first + 10 * per_token
    return Output(
        model="m", operation="chat", tenant="", reason="stop", prompt_tokens=1, output_tokens=11, elapsed=last,
        first=first, last=last, queued=0.0, first_target=target,
    )  # fmt: skip


def test_a_failed_call_is_taken() -> None:
    """Whatever its times."""
    assert TailRule().reason([], is_failed=True, now=0.0) == "failed"
    assert TailRule().reason([output()], is_failed=False, now=0.0) == ""


def test_a_call_that_missed_its_target_is_taken() -> None:
    """A target is the request's own, so it counts from the first call on."""
    assert TailRule().reason([output(target=0.2)], is_failed=False, now=0.0) == ""
    assert TailRule().reason([output(), output(target=0.05)], is_failed=False, now=0.0) == "target"


@pytest.mark.parametrize("slow", [output(first=0.3), output(per_token=0.03)])
def test_a_call_above_the_percentile_is_taken(slow: Output) -> None:
    """A slow first token or slow further tokens count, once enough calls are known to compare with."""
    rule = TailRule()
    assert rule.reason([slow], is_failed=False, now=0.0) == ""
    taken = [rule.reason([output()], is_failed=False, now=0.0) for _ in range(2 * MIN_VALUES)]

    assert not any(taken)
    assert rule.reason([slow], is_failed=False, now=0.0) == "slow"
    assert rule.reason([output()], is_failed=False, now=0.0) == ""


def test_about_one_call_in_a_hundred_is_slow() -> None:
    """The percentile follows the calls, so the share that is taken stays small whatever their times."""
    rule = TailRule()
    times = [((number * 7919) % 1000) / 1000 * (1 + number // 2000) for number in range(6000)]
    taken = [rule.reason([output(first=each)], is_failed=False, now=float(at)) for at, each in enumerate(times)]

    assert 30 <= sum(reason == "slow" for reason in taken[MIN_VALUES:]) <= 300


def test_the_rate_of_taken_calls_is_limited() -> None:
    """While all calls fail, a burst is taken, and then a few per second."""
    rule = TailRule()
    at_once = [rule.reason([], is_failed=True, now=0.0) for _ in range(1000)]
    later = [rule.reason([], is_failed=True, now=number / 100) for number in range(1, 1001)]

    assert at_once.count("failed") == BURST
    assert later.count("failed") == pytest.approx(10 * PER_S, abs=1)


class UnsampledTelemetry(KeptTelemetry):
    """Keeps spans, none of which head sampling chooses."""

    exports = True

    def __init__(self) -> None:
        super().__init__()
        self.tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")


def traced(core: TestCore) -> list[link_pb2.TracedStream]:
    """The streams whose spans the front end has asked for."""
    return [each for message in core.messages for each in message.traced]


def test_a_failed_call_is_exported(tmp_path: Path) -> None:
    """Its spans equal those of a sampled call plus the reason, and the scheduler is asked for the spans below."""

    async def main() -> None:
        telemetry = UnsampledTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_ROW_FAILED)
            call = stack.generation.Generate(tokens_request(1, request_id="mine"), metadata=(UNSAMPLED,))
            with pytest.raises(aio.AioRpcError):
                await call.read()
            await stack.core.saw(lambda core: bool(traced(core)))
            (asked,) = traced(stack.core)
            assert asked.stream == stack.core.submissions[0].stream
            assert not stack.core.submissions[0].traceparent
        spans = telemetry.spans()
        server, tokenize = spans["quire.v1.GenerationService/Generate"], spans["quire.tokenize"]
        attributes = dict(server.attributes or {})

        assert format_trace_id(server.context.trace_id) == TRACE_ID
        assert server.parent is not None
        assert tokenize.parent is not None
        assert format_span_id(server.parent.span_id) == PARENT_ID
        assert tokenize.parent.span_id == server.context.span_id
        assert asked.traceparent == f"00-{TRACE_ID}-{format_span_id(server.context.span_id)}-01"
        assert server.status.status_code is StatusCode.ERROR
        assert attributes["quire.tail"] == "failed"
        assert attributes["error.type"] == "ROW_FAILED"
        assert attributes["quire.request_id"] == "mine"
        assert attributes["rpc.response.status_code"] == "INTERNAL"
        times = (server.start_time, tokenize.start_time, tokenize.end_time, server.end_time)
        assert list(times) == sorted(each for each in times if each is not None)

    asyncio.run(main())


@pytest.mark.parametrize("traceparent", ["", UNSAMPLED[1]])
def test_the_exported_span_has_the_ids_that_are_in_the_log(traceparent: str) -> None:
    """A log line leads to the call's trace; the call's parts have their own ids."""
    telemetry = UnsampledTelemetry()
    tail = TailTracing(telemetry.forced_tracer, telemetry.forced_ids, lambda _number, _traceparent: None)
    with (
        pytest.raises(InternalError),
        request_span(telemetry.tracer, traceparent, rpc("Generate"), tail) as call,
        part_span(telemetry.tracer, "quire.tokenize"),
    ):
        raise InternalError("e")
    spans = telemetry.spans()
    server, tokenize = spans["quire.v1.GenerationService/Generate"], spans["quire.tokenize"]
    logged = call.get_span_context()

    assert not logged.trace_flags.sampled
    assert (server.context.trace_id, server.context.span_id) == (logged.trace_id, logged.span_id)
    assert tokenize.context.trace_id == logged.trace_id
    assert tokenize.context.span_id != logged.span_id


def test_a_call_that_missed_its_target_is_exported(tmp_path: Path) -> None:
    """A call without targets beside it is not."""

    async def main() -> None:
        telemetry = UnsampledTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            await stack.generate(tokens_request(1, max_tokens=4))
            request = tokens_request(1, max_tokens=4, request_id="late")
            request.scheduling.ttft_target.FromNanoseconds(1)
            await stack.generate(request)
            await stack.core.saw(lambda core: bool(traced(core)))
        servers = [span for span in telemetry.exporter.get_finished_spans() if span.name.endswith("/Generate")]

        assert [(span.attributes or {})["quire.tail"] for span in servers] == ["target"]
        assert [(span.attributes or {})["quire.request_id"] for span in servers] == ["late"]

    asyncio.run(main())


def test_a_fault_of_the_client_is_not_exported(tmp_path: Path) -> None:
    """Neither a wrong request, nor a client that leaves."""

    async def main() -> None:
        telemetry = UnsampledTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry, core=lambda a: TestCore(a, limit=5)) as stack:
            request = tokens_request(1)
            request.sampling.temperature = -1
            with pytest.raises(aio.AioRpcError):
                await stack.generate(request)
            call = stack.generation.Generate(tokens_request(1, max_tokens=4000))
            await call.read()
            call.cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))

        assert telemetry.exporter.get_finished_spans() == ()

    asyncio.run(main())
