"""Health, reflection, HTTP probes and metrics."""

import asyncio
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.trace import format_span_id
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from quire_server.scrape import parse
from services.calls.delivery import Delivery
from services.grpc.boundary import Context
from services.grpc.health import HealthServicer
from services.metrics import MAX_TENANTS, FrontendMetrics, Output
from tests.services.stack import TestCore, running_stack, tokens_request
from tests.services.test_tracing import TRACE_ID, TRACEPARENT, KeptTelemetry

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_without_a_worker_the_process_is_alive_and_not_ready(tmp_path: Path) -> None:
    """Liveness holds from the start, readiness needs a core with a worker; gRPC and HTTP agree."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            health = health_pb2_grpc.HealthStub(stack.channel)
            listed = await health.List(health_pb2.HealthListRequest())

            assert {name: response.status for name, response in listed.statuses.items()} == {
                "": NOT_SERVING,
                "liveness": SERVING,
                "readiness": NOT_SERVING,
                "quire.v1.GenerationService": NOT_SERVING,
            }
            assert (await stack.http.get("/health")).status_code == 200
            assert (await stack.http.get("/ready")).status_code == 503

    asyncio.run(main())


def test_watch_tells_when_the_service_becomes_ready(tmp_path: Path) -> None:
    """A watcher sees NOT_SERVING, SERVING once a core is there, and NOT_SERVING when the process stops."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None, grace_period_s=10.0) as stack:
            health = health_pb2_grpc.HealthStub(stack.channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
            first = await watch.read()
            stack.core_or_none = TestCore(f"ipc://{tmp_path}/core")
            second = await watch.read()
            checked = await health.Check(health_pb2.HealthCheckRequest(service=""))
            ready = await stack.http.get("/ready")
            stopping = asyncio.create_task(stack.stop())
            third = await watch.read()
            end = await watch.read()
            await stopping

            assert [first.status, second.status, third.status] == [NOT_SERVING, SERVING, NOT_SERVING]
            assert end is aio.EOF
            assert checked.status == SERVING
            assert ready.status_code == 200

    asyncio.run(main())


def test_a_watch_reports_a_stop_during_its_write() -> None:
    """A stop during the write of SERVING is reported before the call ends."""

    class SlowContext:
        """The call of a client that reads the first message only after the process was asked to stop."""

        def __init__(self) -> None:
            self.written: list[int] = []

        async def write(self, message: health_pb2.HealthCheckResponse) -> None:
            self.written.append(message.status)
            if len(self.written) == 1:
                health.stop()

    health = HealthServicer()
    health.set_ready(True)
    context = SlowContext()
    watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"), cast(Context, context))
    asyncio.run(asyncio.wait_for(watch, 30))

    assert context.written == [SERVING, NOT_SERVING]


def test_an_unknown_service_is_not_found(tmp_path: Path) -> None:
    """Check refuses unknown names; Watch waits for them, as the protocol specifies."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            health = health_pb2_grpc.HealthStub(stack.channel)
            with pytest.raises(aio.AioRpcError) as error:
                await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
            watch = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
            watched = await watch.read()
            watch.cancel()

            assert error.value.code() == grpc.StatusCode.NOT_FOUND
            assert watched.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    asyncio.run(main())


def test_reflection_lists_the_services(tmp_path: Path) -> None:
    """A client without the proto files finds the services and the request's description."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="quire.v1.GenerateRequest"),
            ]
            listed, found = [response async for response in stub.ServerReflectionInfo(iter(requests))]

            assert {service.name for service in listed.list_services_response.service} >= {
                "quire.v1.GenerationService",
                "quire.v1.ModelService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            assert found.file_descriptor_response.file_descriptor_proto

    asyncio.run(main())


def test_metrics_are_the_whole_services(tmp_path: Path) -> None:
    """A scrape shows the core's merged metrics, including the front end's own current values."""

    async def main() -> None:
        class Core(TestCore):
            def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
                family = message.report.families.add(name="quire_kv_blocks", type="gauge", help="KV blocks")
                family.samples.add(name="quire_kv_blocks", labels={"state": "free"}, value=7)
                super().handle(peer, message)

        async with running_stack(tmp_path, core=Core) as stack:
            await stack.generate(tokens_request(1, 2, 3, max_tokens=5))
            response = await stack.http.get("/metrics")
            lines = response.text.splitlines()

            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'quire_kv_blocks{state="free"} 7.0' in lines
            assert 'vllm:prompt_tokens_total{frontend="frontend-0",model_name="echo"} 3.0' in lines
            assert 'vllm:generation_tokens_total{frontend="frontend-0",model_name="echo"} 5.0' in lines
            assert 'quire_live_streams{frontend="frontend-0"} 0.0' in lines
            assert 'vllm:inter_token_latency_seconds_count{frontend="frontend-0",model_name="echo"} 4.0' in lines
            scrape = parse(response.text)
            gen_ai = {
                "gen_ai_operation_name": "text_completion",
                "gen_ai_provider_name": "quire",
                "gen_ai_request_model": "echo",
            }
            call = {"rpc_system_name": "grpc", "rpc_method": "quire.v1.GenerationService/Generate"}
            assert scrape.sum("gen_ai_server_time_to_first_token_seconds_count", **gen_ai) == 1
            assert scrape.sum("gen_ai_server_time_per_output_token_seconds_count", **gen_ai) == 1
            assert scrape.sum("gen_ai_server_request_duration_seconds_bucket", le="+Inf", **gen_ai) == 1
            assert scrape.sum("rpc_server_call_duration_seconds_count", rpc_response_status_code="OK", **call) == 1

    asyncio.run(main())


def test_the_inter_token_latency_counts_every_token(tmp_path: Path) -> None:
    """A three-token message after a gap adds this gap and two gaps of 0; a message without tokens adds none."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, tokens_per_step=3)) as stack:
            deltas, _ = await stack.generate(tokens_request(1, 2, 3, max_tokens=9))
            lines = (await stack.http.get("/metrics")).text.splitlines()
            name = "vllm:inter_token_latency_seconds"
            messages = sum(1 for delta in deltas if delta.token_ids)

            assert messages <= 3
            assert f'{name}_count{{frontend="frontend-0",model_name="echo"}} 8.0' in lines
            in_first_bucket = next(line for line in lines if line.startswith(f"{name}_bucket") and 'le="0.001"' in line)
            assert float(in_first_bucket.split()[-1]) >= 9 - messages

    asyncio.run(main())


def test_a_bucket_of_a_sampled_request_leads_to_its_trace(tmp_path: Path) -> None:
    """A reader that accepts OpenMetrics gets an exemplar with the request's trace; others get none.

    The exemplar names a span that was exported.
    """

    async def main() -> None:
        telemetry = KeptTelemetry()
        accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            request = tokens_request(1, max_tokens=3)
            async for _ in stack.generation.Generate(request, metadata=(TRACEPARENT,)):
                pass
            found = await stack.http.get("/metrics", headers=accept)
            plain = await stack.http.get("/metrics")

            assert found.headers["content-type"].startswith("application/openmetrics-text")
            assert found.text.endswith("# EOF\n")
            assert "trace_id" not in plain.text
            span = telemetry.spans()["quire.v1.GenerationService/Generate"]
            parsed = text_string_to_metric_families(found.text)  # type: ignore[no-untyped-call]
            families = {each.name: each for each in parsed}
            for name in (
                "gen_ai_server_request_duration_seconds",
                "gen_ai_server_time_to_first_token_seconds",
                "gen_ai_server_time_per_output_token_seconds",
            ):
                exemplars = [each.exemplar for each in families[name].samples if each.exemplar is not None]
                assert exemplars, name
                assert exemplars[0].labels == {
                    "trace_id": TRACE_ID,
                    "span_id": format_span_id(span.context.span_id),
                }

    asyncio.run(main())


def test_goodput_counts_each_request_against_its_own_targets(tmp_path: Path) -> None:
    """A target that was reached in time is met, a later one is missed, and a request without targets counts as neither.

    The tokens count for the request's tenant.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for seconds in (3600, 1e-6, None):
                request = tokens_request(1, 2, max_tokens=4)
                request.scheduling.tenant = "search"
                if seconds is not None:
                    request.scheduling.ttft_target.FromNanoseconds(int(seconds * 1e9))
                    request.scheduling.total_time_target.FromNanoseconds(int(seconds * 1e9))
                await stack.generate(request)
            scrape = parse((await stack.http.get("/metrics")).text)

            for target in ("first_token", "total"):
                assert scrape.sum("quire_request_targets_total", target=target, outcome="met") == 1
                assert scrape.sum("quire_request_targets_total", target=target, outcome="missed") == 1
            assert scrape.sum("quire_tenant_tokens_total", tenant="search", kind="output") == 12
            assert scrape.sum("quire_tenant_requests_total", tenant="search", finished_reason="length") == 3

    asyncio.run(main())


def test_the_tokens_of_a_prompt_count_once(tmp_path: Path) -> None:
    """The choices of a request share its prompt, so the tenant's tokens and the model's are the same sum."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(1, 2, 3, max_tokens=4)
            request.scheduling.tenant = "search"
            request.sampling.n = 8
            await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request))
            scrape = parse((await stack.http.get("/metrics")).text)

            assert scrape.sum("quire_tenant_tokens_total", tenant="search", kind="prompt") == 3
            assert scrape.sum("quire_tenant_tokens_total", tenant="search", kind="output") == 8 * 4
            assert scrape.sum("vllm:prompt_tokens_total") == 3

    asyncio.run(main())


def test_a_fault_of_the_server_counts_as_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output ended by an unexpected exception is an error, not a disconnected client."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            monkeypatch.setattr(Delivery, "_response", fail)
            with pytest.raises(aio.AioRpcError):
                await stack.generate(tokens_request(1, 2, 3, max_tokens=4))
            scrape = parse((await stack.http.get("/metrics")).text)

            assert scrape.sum("vllm:request_success_total", finished_reason="error") == 1
            assert scrape.sum("vllm:request_success_total", finished_reason="abort") == 0

    asyncio.run(main())


def test_a_client_that_leaves_counts_as_an_abort(tmp_path: Path) -> None:
    """An output whose client cancels the call is no error."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=5)) as stack:
            call = stack.generation.Generate(tokens_request(1, 2, 3, max_tokens=4000))
            await call.read()
            call.cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))
            scrape = parse((await stack.http.get("/metrics")).text)

            assert scrape.sum("vllm:request_success_total", finished_reason="abort") == 1
            assert scrape.sum("vllm:request_success_total", finished_reason="error") == 0

    asyncio.run(main())


def test_the_time_to_the_first_token_is_the_same_everywhere(tmp_path: Path) -> None:
    """The answer's timings and the histogram both end when the first token was written."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            _, finished = await stack.generate(tokens_request(1, 2, 3, max_tokens=4))
            scrape = parse((await stack.http.get("/metrics")).text)

            seconds = finished.timings.first_token.ToNanoseconds() / 1e9
            counted = scrape.sum("gen_ai_server_time_to_first_token_seconds_sum")
            assert seconds == pytest.approx(counted, abs=2e-9)

    asyncio.run(main())


def test_tenants_beyond_the_limit_share_a_series() -> None:
    """Clients that invent tenants cannot create more than a bounded number of series; the sum loses no token."""
    metrics = FrontendMetrics("f")
    for number in range(MAX_TENANTS + 50):
        metrics.prompt_submitted("m", f"t{number}", 1)
        metrics.output_ended(
            Output(
                model="m",
                operation="chat",
                tenant=f"t{number}",
                reason="stop",
                prompt_tokens=1,
                output_tokens=2,
                elapsed=1.0,
                first=0.1,
                last=0.2,
                queued=0.0,
            )
        )
    (family,) = [each for each in metrics.families() if each.name == "quire_tenant_tokens"]
    by_tenant = {sample.labels["tenant"] for sample in family.samples}

    assert len(by_tenant) == MAX_TENANTS + 1
    assert sum(sample.value for sample in family.samples) == 3 * (MAX_TENANTS + 50)


def test_metrics_without_a_core_are_the_front_ends_own(tmp_path: Path) -> None:
    """When the core does not answer, a scrape still works."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            response = await stack.http.get("/metrics")

            assert response.status_code == 200
            lines = response.text.splitlines()
            assert 'quire_live_streams{frontend="frontend-0"} 0.0' in lines
            assert 'quire_scheduler_connected{frontend="frontend-0"} 0.0' in lines
            assert 'quire_scheduler_ready{frontend="frontend-0"} 0.0' in lines
            (silence,) = [line for line in lines if line.startswith("quire_scheduler_silence_seconds{")]
            assert float(silence.split()[-1]) > 0

    asyncio.run(main())


def test_a_front_end_counts_the_restarts_of_its_scheduler(tmp_path: Path) -> None:
    """Two cores after the first one: connected and ready. One core said that it would end, and one was lost."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for leaves in (True, False):
                address = stack.core.address
                if leaves:
                    await stack.generate(tokens_request(1))
                    message = link_pb2.CoreMessage(incarnation=stack.core.incarnation, leaves=True)
                    stack.core.say(message.SerializeToString())
                await stack.generate(tokens_request(1))  # Its tokens arrive after the message.
                stack.core.kill()
                stack.core_or_none = TestCore(address)
            await stack.generate(tokens_request(1))
            lines = (await stack.http.get("/metrics")).text.splitlines()

            assert 'quire_scheduler_connected{frontend="frontend-0"} 1.0' in lines
            assert 'quire_scheduler_ready{frontend="frontend-0"} 1.0' in lines
            assert 'quire_scheduler_restarts_total{frontend="frontend-0",reason="lost"} 1.0' in lines
            assert 'quire_scheduler_restarts_total{frontend="frontend-0",reason="planned"} 1.0' in lines

    asyncio.run(main())
