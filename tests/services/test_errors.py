"""What a client sees in case of an error: code, ErrorInfo, BadRequest, retry hints; and no process dies."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc import aio
from grpc_status import rpc_status

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire.v1 import generation_pb2 as v1
from quire.v1 import model_pb2, model_pb2_grpc
from services.streams.stream import Stream
from tests.services.stack import Stack, TestCore, joined_ids, running_stack, tokens_request

GENERATE = "/quire.v1.GenerationService/Generate"


class Refusal:
    """A failed call, taken apart."""

    def __init__(self, error: aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details()
        self.trailing = dict(error.trailing_metadata())
        status = rpc_status.from_call(error)
        self.info = error_details_pb2.ErrorInfo()
        self.bad_request = error_details_pb2.BadRequest()
        self.retry = error_details_pb2.RetryInfo()
        for detail in status.details if status is not None else ():
            for message in (self.info, self.bad_request, self.retry):
                detail.Unpack(message)

    @property
    def fields(self) -> list[str]:
        """The fields that are named."""
        return [violation.field for violation in self.bad_request.field_violations]


async def refused(call: Awaitable[Any]) -> Refusal:
    """The refusal of a call that must fail."""
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return Refusal(error.value)


async def send_raw(stack: Stack, method: str, payload: bytes) -> list[bytes]:
    """Sends bytes that no generated code would produce."""
    multi_callable: aio.UnaryStreamMultiCallable[bytes, bytes] = stack.channel.unary_stream(method)
    return [response async for response in multi_callable(payload)]


async def still_serves(stack: Stack) -> None:
    """The front end answers as if nothing had happened."""
    deltas, _ = await stack.generate(tokens_request(5, 6, max_tokens=4))
    assert joined_ids(deltas) == [5, 6, 5, 6]


def test_wrong_fields_are_named_in_the_status(tmp_path: Path) -> None:
    """INVALID_ARGUMENT carries ErrorInfo of domain quire and one BadRequest violation per field."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(1, max_tokens=0)
            request.sampling.temperature = float("nan")
            refusal = await refused(stack.generate(request))

            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert (refusal.info.domain, refusal.info.reason) == ("quire", "INVALID_REQUEST")
            assert refusal.fields == ["sampling.temperature", "stop.max_tokens"]
            assert "grpc-retry-pushback-ms" not in refusal.trailing
            await still_serves(stack)

    asyncio.run(main())


def test_an_unsupported_field_is_unimplemented(tmp_path: Path) -> None:
    """UNIMPLEMENTED names the field in ErrorInfo's metadata."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(1)
            request.adapter = "lora"
            refusal = await refused(stack.generate(request))

            assert refusal.code == grpc.StatusCode.UNIMPLEMENTED
            assert refusal.info.reason == "UNSUPPORTED_FIELD"
            assert refusal.info.metadata["field"] == "adapter"

    asyncio.run(main())


def test_bytes_that_do_not_parse_are_an_invalid_argument(tmp_path: Path) -> None:
    """Invalid UTF-8 names its field, and other garbage the request; both are INVALID_ARGUMENT."""
    tokenize, get_model = "/quire.v1.GenerationService/Tokenize", "/quire.v1.ModelService/GetModel"
    broken = [
        (GENERATE, b"\x1a\x02\xff\xfe", "text"),
        (GENERATE, b"\x22\x06\x0a\x04\x12\x02a\xff", "chat.messages.content"),
        (GENERATE, b"\x0a\x01\x80\x1a\x01a", "request_id"),
        (GENERATE, b"\xff\xff\xff\xff", "request"),
        (tokenize, b"\x12\x01\xff", "text"),
        (get_model, b"\x0a\x01\xff", "name"),
    ]

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for method, payload, field in broken:
                refusal = await refused(send_raw(stack, method, payload))

                assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
                assert refusal.fields == [field]
            await still_serves(stack)

    asyncio.run(main())


def test_a_template_that_refuses_names_chat(tmp_path: Path) -> None:
    """The chat template's own words reach the client as a violation of `chat`."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            chat = v1.ChatInput(messages=[v1.ChatMessage(role="martian", content="hi")])
            refusal = await refused(stack.generate(v1.GenerateRequest(chat=chat)))

            assert refusal.fields == ["chat"]
            assert "no martians" in refusal.bad_request.field_violations[0].description

    asyncio.run(main())


def test_a_text_longer_than_the_model_names_text(tmp_path: Path) -> None:
    """The length is known after tokenising; the field is still the one the client sent."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            refusal = await refused(stack.generate(v1.GenerateRequest(text="xyz " * 5000)))

            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
            assert refusal.fields == ["text"]

    asyncio.run(main())


def test_a_live_request_id_is_not_taken_twice(tmp_path: Path) -> None:
    """ALREADY_EXISTS while the first call is live; afterwards the id is free again."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1)) as stack:
            first = stack.generation.Generate(tokens_request(1, max_tokens=5, request_id="same"))
            await first.read()
            refusal = await refused(stack.generate(tokens_request(1, max_tokens=1, request_id="same")))
            first.cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))
            _, finished = await stack.generate(tokens_request(1, max_tokens=1, request_id="same"))

            assert refusal.code == grpc.StatusCode.ALREADY_EXISTS
            assert refusal.info.reason == "DUPLICATE_REQUEST_ID"
            assert finished.request_id == "same"

    asyncio.run(main())


def test_without_a_core_calls_are_unavailable(tmp_path: Path) -> None:
    """Every call is refused with NOT_READY, RetryInfo and a pushback until a worker has joined."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            models = model_pb2_grpc.ModelServiceStub(stack.channel)
            for call in (
                stack.generate(tokens_request(1)),
                stack.generation.Tokenize(v1.TokenizeRequest(text="x")),
                models.GetModel(model_pb2.GetModelRequest()),
            ):
                refusal = await refused(call)

                assert refusal.code == grpc.StatusCode.UNAVAILABLE
                assert refusal.info.reason == "NOT_READY"
                assert refusal.trailing["grpc-retry-pushback-ms"] == "1000"
                assert refusal.retry.retry_delay.ToMilliseconds() == 1000

    asyncio.run(main())


def test_more_calls_than_the_process_may_have_are_refused(tmp_path: Path) -> None:
    """One call too many ends with RESOURCE_EXHAUSTED and a retry delay, and never reaches the core.

    A place that becomes free can be used again. An operator is never refused.
    """

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1), max_concurrent_requests=2) as stack:
            calls = [stack.generation.Generate(tokens_request(1, max_tokens=5)) for _ in range(2)]
            for call in calls:
                await call.read()
            for late in (stack.generate(tokens_request(1)), stack.generation.Tokenize(v1.TokenizeRequest(text="x"))):
                refusal = await refused(late)

                assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert refusal.info.reason == "OVERLOADED"
                assert refusal.trailing["grpc-retry-pushback-ms"] == "1000"
            operator = admin_pb2_grpc.AdminServiceStub(stack.channel)
            await operator.ListWorkers(admin_pb2.ListWorkersRequest())
            calls[0].cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))
            await stack.generate(tokens_request(1, max_tokens=1))

            assert len(stack.core.submissions) == 3

    asyncio.run(main())


def test_errors_of_operator_calls_keep_their_reason(tmp_path: Path) -> None:
    """The core's reason decides code and reason, a field becomes a violation, and a wrong answer is UNIMPLEMENTED."""
    code, report = grpc.StatusCode, link_pb2.OperatorError
    expected = [
        (report(reason="WORKER_NOT_FOUND", message="m"), code.NOT_FOUND, "WORKER_NOT_FOUND"),
        (report(reason="REQUEST_NOT_FOUND", message="m"), code.NOT_FOUND, "REQUEST_NOT_FOUND"),
        (report(reason="UNSUPPORTED_METHOD", message="m"), code.UNIMPLEMENTED, "UNSUPPORTED_METHOD"),
        (report(reason="INVALID_REQUEST", field="level", message="m"), code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        (report(reason="OF_A_LATER_VERSION", message="m"), code.INTERNAL, "INTERNAL"),
        (None, code.UNIMPLEMENTED, "UNSUPPORTED_METHOD"),
    ]

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            operator = admin_pb2_grpc.AdminServiceStub(stack.channel)
            for error, status, reason in expected:
                stack.core.operator_error = error
                refusal = await refused(operator.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="w")))

                assert (refusal.code, refusal.info.reason) == (status, reason)
                assert refusal.fields == ([error.field] if error is not None and error.field else [])

    asyncio.run(main())


def test_every_end_of_the_core_has_its_status(tmp_path: Path) -> None:
    """The core's reason decides code and reason; the core's own words are the message."""
    code = grpc.StatusCode
    expected = {
        link_pb2.END_REASON_CANCELLED: (code.CANCELLED, "CANCELLED"),
        link_pb2.END_REASON_DEADLINE: (code.DEADLINE_EXCEEDED, "DEADLINE"),
        link_pb2.END_REASON_QUEUE_FULL: (code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        link_pb2.END_REASON_TENANT_LIMIT: (code.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
        link_pb2.END_REASON_INVALID: (code.INVALID_ARGUMENT, "INVALID_REQUEST"),
        link_pb2.END_REASON_NO_WORKER: (code.UNAVAILABLE, "NO_WORKER"),
        link_pb2.END_REASON_ROW_FAILED: (code.INTERNAL, "ROW_FAILED"),
        link_pb2.END_REASON_POISON: (code.INTERNAL, "POISON_REQUEST"),
        link_pb2.END_REASON_STALLED: (code.ABORTED, "STALLED_READER"),
        link_pb2.END_REASON_DUPLICATE: (code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
        link_pb2.END_REASON_SHUTDOWN: (code.UNAVAILABLE, "NOT_READY"),
    }
    successes = {link_pb2.END_REASON_STOP, link_pb2.END_REASON_STOP_STRING, link_pb2.END_REASON_LENGTH}
    of_others = {link_pb2.END_REASON_UNSPECIFIED, link_pb2.END_REASON_EMBEDDED}
    assert set(link_pb2.EndReason.values()) == set(expected) | successes | of_others

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for end, code_and_reason in expected.items():
                stack.core.end_at_once = link_pb2.StreamEnd(reason=end, message="the core's words", retry_ms=250)
                refusal = await refused(stack.generate(tokens_request(1)))

                assert (refusal.code, refusal.info.reason) == code_and_reason
                assert "the core's words" in str(refusal.message)
                if end == link_pb2.END_REASON_QUEUE_FULL:
                    assert refusal.trailing["grpc-retry-pushback-ms"] == "250"

    asyncio.run(main())


def test_an_invalid_end_names_its_field(tmp_path: Path) -> None:
    """The client gets the field named by the core, or the input if there is none."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for field, expected in (("grammar", "grammar"), ("", "input")):
                stack.core.end_at_once = link_pb2.StreamEnd(
                    reason=link_pb2.END_REASON_INVALID, message="leaves no token to choose", field=field
                )
                refusal = await refused(stack.generate(tokens_request(1)))

                assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
                assert refusal.fields == [expected]
                assert refusal.message == f"{expected}: leaves no token to choose"

    asyncio.run(main())


def test_a_name_that_is_not_served_is_not_found(tmp_path: Path) -> None:
    """GetModel answers NOT_FOUND for another name."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            models = model_pb2_grpc.ModelServiceStub(stack.channel)
            refusal = await refused(models.GetModel(model_pb2.GetModelRequest(name="other")))

            assert refusal.code == grpc.StatusCode.NOT_FOUND
            assert refusal.info.reason == "MODEL_NOT_FOUND"

    asyncio.run(main())


def test_an_unexpected_exception_is_internal_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as INTERNAL with an error id; the core gets a cancellation and the request id is free."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=3)) as stack:
            with monkeypatch.context() as patch:
                patch.setattr(Stream, "taken", lambda self: 1 / 0)
                refusal = await refused(stack.generate(tokens_request(1, request_id="same")))
            await stack.core.saw(lambda core: len(core.cancelled) == 1)
            _, finished = await stack.generate(tokens_request(1, max_tokens=2, request_id="same"))

            assert refusal.code == grpc.StatusCode.INTERNAL
            assert refusal.info.metadata["error_id"] in str(refusal.message)
            assert "division" not in str(refusal.message)
            assert finished.request_id == "same"

    asyncio.run(main())


def test_a_request_that_cannot_be_submitted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault on the way to the core frees the request id, and no later core hears of the request."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            with monkeypatch.context() as patch:
                patch.setattr(Stream, "submission", lambda self, now: 1 / 0)
                refusal = await refused(stack.generate(tokens_request(1, request_id="same")))
            address = stack.core.address
            stack.core.kill()
            stack.core_or_none = TestCore(address)
            await stack.core.saw(lambda core: any(message.HasField("report") for message in core.messages))
            _, finished = await stack.generate(tokens_request(1, max_tokens=2, request_id="same"))

            assert refusal.code == grpc.StatusCode.INTERNAL
            assert finished.request_id == "same"
            assert len(stack.core.submissions) == 1

    asyncio.run(main())


def test_a_message_over_the_limit_is_refused_by_grpc(tmp_path: Path) -> None:
    """A request of many megabytes ends RESOURCE_EXHAUSTED and costs nothing else."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            refusal = await refused(stack.generate(v1.GenerateRequest(text="x" * (9 << 20))))

            assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            await still_serves(stack)

    asyncio.run(main())
