"""Clients that read nothing: gRPC waits for them forever, but the front end does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.link import core_link
from tests.services.stack import MODEL, Stack, TestCore, running_stack, tokens_request
from tests.services.test_core_link import Call, collect
from tests.services.test_errors import Refusal

LONG = link_pb2.ServedModel()
LONG.CopyFrom(MODEL)
LONG.max_model_len = 1 << 24

RPC_CALLS = "rpc_server_call_duration_seconds_count"


@pytest.fixture(autouse=True)
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are what these tests wait for."""
    monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)


@asynccontextmanager
async def stalled_call(stack: Stack, max_tokens: int) -> AsyncIterator[Call]:
    """A call whose client reads only the first message; gRPC buffers 64 KiB for it."""
    async with aio.insecure_channel(stack.target, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(tokens_request(5, 6, 7, max_tokens=max_tokens, request_id="slow"))
        assert isinstance(await call.read(), v1.GenerateResponse)
        yield call


async def read_to_the_end(call: Call) -> Refusal:
    """Takes what is left and returns the status of a call that must have failed."""
    with pytest.raises(aio.AioRpcError) as error:
        await collect(call)
    return Refusal(error.value)


def gives_no_more_credit(core: TestCore) -> bool:
    """Several reports have arrived since the last credit, so the front end is waiting for its client."""
    credits = [index for index, message in enumerate(core.messages) if message.credit_streams]
    since = core.messages[credits[-1] :] if credits else []
    return sum(message.HasField("report") for message in since) >= 4


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (link_pb2.END_REASON_STALLED, grpc.StatusCode.ABORTED),
        (link_pb2.END_REASON_NO_WORKER, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_failed_stream_does_not_wait_for_its_reader(
    tmp_path: Path, reason: link_pb2.EndReason.ValueType, code: grpc.StatusCode
) -> None:
    """When the core ends a stream whose client does not read, the call is over and its id is free at once.

    The client gets the status when it reads again.
    """

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, tokens_per_step=512, model=LONG)) as stack,
            stalled_call(stack, 1 << 23) as call,
        ):
            await stack.core.saw(gives_no_more_credit)
            end = link_pb2.StreamEnd(stream=stack.core.submissions[0].stream, reason=reason)
            stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, ends=[end]).SerializeToString())
            await stack.core.saw(lambda core: core.reported(RPC_CALLS, rpc_response_status_code=code.name) == 1)
            await stack.generate(tokens_request(5, max_tokens=2, request_id="slow"))
            refusal = await read_to_the_end(call)

            assert stack.core.reported("quire_live_streams") == 0
            assert refusal.code == code

    asyncio.run(main())


def test_a_complete_answer_does_not_wait_for_its_reader(tmp_path: Path) -> None:
    """A response that the core has finished is dropped if its client reads nothing for the configured time."""

    async def main() -> None:
        async with (
            running_stack(
                tmp_path,
                core=lambda a: TestCore(a, tokens_per_step=1 << 16, model=LONG),
                stream_credit=1 << 24,
                stall_timeout_s=0.2,
            ) as stack,
            stalled_call(stack, 1 << 20) as call,
        ):
            await stack.core.saw(lambda core: core.reported(RPC_CALLS, rpc_response_status_code="ABORTED") == 1)
            refusal = await read_to_the_end(call)

            assert stack.core.reported("quire_live_streams") == 0
            assert stack.core.cancelled == []
            assert (refusal.code, refusal.info.reason) == (grpc.StatusCode.ABORTED, "STALLED_READER")

    asyncio.run(main())
