"""One trace from the client's call through the front end to the core; no prompts in spans or logs."""

import asyncio
from pathlib import Path

import pytest
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_span_id, format_trace_id

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.calls import tracing
from shared.otlp_metrics import Families
from shared.telemetry import ReusableIds, Telemetry
from tests.services.stack import TestCore, running_stack, tokens_request
from tests.services.tokenizers_for_tests import byte_level

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")
SECRET = "xyzzy"


class KeptTelemetry(Telemetry):
    """Keeps finished spans instead of exporting them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracer = self._tracer(TracerProvider())
        self.forced_ids = ReusableIds()
        self.forced_tracer = self._tracer(TracerProvider(sampler=ALWAYS_ON, id_generator=self.forced_ids))

    def _tracer(self, provider: TracerProvider) -> Tracer:
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return provider.get_tracer("test")

    def shutdown(self, families: Families | None = None) -> None:
        """Nothing is pending."""

    def spans(self) -> dict[str, ReadableSpan]:
        """Finished spans by name."""
        return {span.name: span for span in self.exporter.get_finished_spans()}


def test_the_clients_trace_goes_on_to_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server span is a child of the client's, tokenisation is its child, and the core gets the server span."""
    monkeypatch.setattr(tracing, "OPT_INS", {"gen_ai_latest_experimental"})

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            request = v1.GenerateRequest(text="the fox", stop=v1.StopOptions(max_tokens=5), request_id="mine")
            async for _ in stack.generation.Generate(request, metadata=(TRACEPARENT,)):
                pass
            submission = stack.core.submissions[0]
        spans = telemetry.spans()

        server, tokenize = spans["quire.v1.GenerationService/Generate"], spans["quire.tokenize"]
        assert server.kind is SpanKind.SERVER
        assert server.parent is not None
        assert tokenize.parent is not None
        assert format_trace_id(server.context.trace_id) == TRACE_ID
        assert format_span_id(server.parent.span_id) == PARENT_ID
        assert tokenize.parent.span_id == server.context.span_id
        assert submission.traceparent == f"00-{TRACE_ID}-{format_span_id(server.context.span_id)}-01"
        attributes = dict(server.attributes or {})
        assert attributes["rpc.system.name"] == "grpc"
        assert attributes["rpc.method"] == "quire.v1.GenerationService/Generate"
        assert attributes["rpc.response.status_code"] == "OK"
        assert attributes["gen_ai.request.model"] == "echo"
        assert attributes["gen_ai.request.max_tokens"] == 5
        assert attributes["gen_ai.usage.input_tokens"] == submission.num_prompt_tokens
        assert attributes["gen_ai.usage.output_tokens"] == 5
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert attributes["quire.request_id"] == "mine"
        assert server.status.status_code is StatusCode.UNSET

    asyncio.run(main())


@pytest.mark.parametrize("drafts", [(0, 0), (7, 5)])
def test_the_drafts_of_a_call_are_on_its_span(drafts: tuple[int, int], tmp_path: Path) -> None:
    """The span has the verified and the accepted drafts of the call, and neither if there were none."""

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(
                reason=link_pb2.END_REASON_LENGTH, draft_tokens=drafts[0], accepted_draft_tokens=drafts[1]
            )
            await stack.generate(tokens_request(1))
        attributes = dict(telemetry.spans()["quire.v1.GenerationService/Generate"].attributes or {})

        found = tuple(attributes.get(f"quire.{name}draft_tokens", 0) for name in ("", "accepted_"))
        assert found == drafts
        assert ("quire.draft_tokens" in attributes) == (drafts[0] > 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("end", "reason", "code", "status"),
    [
        (link_pb2.END_REASON_QUEUE_FULL, "QUEUE_FULL", "RESOURCE_EXHAUSTED", StatusCode.UNSET),
        (link_pb2.END_REASON_ROW_FAILED, "ROW_FAILED", "INTERNAL", StatusCode.ERROR),
    ],
)
def test_an_error_marks_the_span(
    end: link_pb2.EndReason.ValueType, reason: str, code: str, status: StatusCode, tmp_path: Path
) -> None:
    """A failed call's span has reason and status code; only a server fault makes it an error."""

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(reason=end)
            with pytest.raises(aio.AioRpcError):
                await stack.generate(tokens_request(1))
        server = telemetry.spans()["quire.v1.GenerationService/Generate"]
        attributes = dict(server.attributes or {})

        assert server.status.status_code is status
        assert attributes["error.type"] == reason
        assert attributes["rpc.response.status_code"] == code

    asyncio.run(main())


@pytest.mark.parametrize("opted", [set(), {"rpc/dup"}])
def test_attributes_of_unstable_conventions_are_opt_in(
    opted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the opt-in a span has no `gen_ai.*`; `rpc/dup` adds the earlier names to the new ones."""
    monkeypatch.setattr(tracing, "OPT_INS", opted)

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            await stack.generate(tokens_request(1, max_tokens=2))
        attributes = dict(telemetry.spans()["quire.v1.GenerationService/Generate"].attributes or {})

        assert not [name for name in attributes if name.startswith("gen_ai.")]
        assert attributes["rpc.response.status_code"] == "OK"
        assert attributes.get("rpc.grpc.status_code") == (0 if opted else None)
        assert attributes.get("rpc.service") == ("quire.v1.GenerationService" if opted else None)

    asyncio.run(main())


def test_http_requests_are_named_as_http_requests_are(tmp_path: Path) -> None:
    """Method and route name an HTTP request's span, and only a server fault makes it an error.

    The span has the status, and is a child of the client's span.
    """

    async def main() -> None:
        telemetry = KeptTelemetry()
        found = []
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            for body in ({"prompt": "the fox", "max_tokens": 3}, {"prompt": "the fox", "temperature": -1}):
                answer = await stack.http.post("/v1/completions", json=body, headers=dict([TRACEPARENT]))
                found.append((answer.status_code, telemetry.spans()["POST /v1/completions"]))
            stack.core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_ROW_FAILED)
            answer = await stack.http.post("/v1/completions", json={"prompt": "the fox"})
            found.append((answer.status_code, telemetry.spans()["POST /v1/completions"]))

        assert [status for status, _ in found] == [200, 400, 500]
        for status, span in found:
            attributes = dict(span.attributes or {})
            assert span.kind is SpanKind.SERVER
            assert attributes["http.request.method"] == "POST"
            assert attributes["http.route"] == attributes["url.path"] == "/v1/completions"
            assert attributes["http.response.status_code"] == status
            assert ("error.type" in attributes) == (status != 200)
            assert (span.status.status_code is StatusCode.ERROR) == (status == 500)
        parent = found[0][1].parent
        assert parent is not None
        assert format_span_id(parent.span_id) == PARENT_ID

    asyncio.run(main())


def test_several_prompts_are_one_call(tmp_path: Path) -> None:
    """One HTTP request with several prompts is one server span with a span for each prompt, which the core gets.

    If the call is not sampled, neither is any of its parts.
    """

    async def main() -> None:
        telemetry = KeptTelemetry()
        body = {"prompt": ["the fox", "the dog"], "max_tokens": 3}
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            answer = await stack.http.post("/v1/completions", json=body, headers=dict([TRACEPARENT]))
            submissions = list(stack.core.submissions)
            spans = telemetry.exporter.get_finished_spans()
            unsampled = {"traceparent": TRACEPARENT[1].removesuffix("1") + "0"}
            await stack.http.post("/v1/completions", json=body, headers=unsampled)
        servers = [span for span in spans if span.kind is SpanKind.SERVER]
        prompts = [span for span in spans if span.name == "quire.prompt"]

        assert answer.status_code == 200
        assert [(span.name, format_span_id(span.parent.span_id)) for span in servers if span.parent] == [
            ("POST /v1/completions", PARENT_ID)
        ]
        assert dict(servers[0].attributes or {})["http.response.status_code"] == 200
        assert [span.parent and span.parent.span_id for span in prompts] == [servers[0].context.span_id] * 2
        assert all("http.response.status_code" not in (span.attributes or {}) for span in prompts)
        assert {each.traceparent for each in submissions} == {
            f"00-{TRACE_ID}-{format_span_id(span.context.span_id)}-01" for span in prompts
        }
        assert len(telemetry.exporter.get_finished_spans()) == len(spans)

    asyncio.run(main())


def test_a_prompt_that_fails_ends_the_call(tmp_path: Path) -> None:
    """The call's span has the error that its client got, and the prompt's span the reason."""

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_ROW_FAILED)
            answer = await stack.http.post("/v1/completions", json={"prompt": ["the fox", "the dog"]})
        spans = telemetry.spans()
        call, prompt = (dict(spans[name].attributes or {}) for name in ("POST /v1/completions", "quire.prompt"))

        assert answer.status_code == call["http.response.status_code"] == 500
        assert call["error.type"] == "ROW_FAILED"
        assert prompt["error.type"] in (call["error.type"], "CANCELLED")

    asyncio.run(main())


def test_nothing_of_a_prompt_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither spans nor logs hold text of prompt or answer, whether the call succeeds, fails or is cancelled."""

    async def main() -> list[str]:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry, core=lambda a: TestCore(a, limit=20)) as stack:
            options = v1.StopOptions(max_tokens=20)
            await stack.generate(v1.GenerateRequest(text=SECRET, stop=options))
            with pytest.raises(aio.AioRpcError):
                await stack.generate(v1.GenerateRequest(text=SECRET * 5000))
            call = stack.generation.Generate(v1.GenerateRequest(text=SECRET, stop=v1.StopOptions(max_tokens=30)))
            await call.read()
            call.cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))
        return [span.to_json() for span in telemetry.exporter.get_finished_spans()]

    spans = asyncio.run(main())

    assert len(spans) == 6
    assert byte_level().decode(byte_level().encode(SECRET).ids) == SECRET
    assert all(SECRET not in span for span in spans)
    out, err = capfd.readouterr()
    assert SECRET not in out + err
