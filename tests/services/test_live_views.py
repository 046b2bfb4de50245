"""Operators' live views at a real front end: bounded, complete or with counted gaps, and ended with their callers."""

import asyncio
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from grpc import aio

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from services.link.live_view import MAX_UNREAD_BYTES, MAX_UNREAD_PARTS, LiveView
from shared.errors import NotReadyError
from tests.services.stack import PATIENCE_S, Stack, running_stack


def _part(number: int, first: int, count: int, padding: int = 0) -> link_pb2.View:
    """Return a part of a view with `count` steps of `padding` rows."""
    response = admin.WatchStepsResponse()
    for step in range(first, first + count):
        response.steps.add(worker_id="w", step=step, decode_rows=range(padding))
    return link_pb2.View(number=number, response=response.SerializeToString(), steps=count)


def _say(stack: Stack, part: link_pb2.View) -> None:
    stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, views=[part]).SerializeToString())


_Call: TypeAlias = "aio.UnaryStreamCall[admin.WatchStepsRequest, admin.WatchStepsResponse]"


async def _read(call: _Call) -> admin.WatchStepsResponse:
    response = await call.read()
    assert isinstance(response, admin.WatchStepsResponse)
    return response


async def _watching(stack: Stack, call: _Call) -> int:
    """Wait until a view has begun; return its number at the core."""
    first = await _read(call)
    assert first == admin.WatchStepsResponse()
    return [request.number for message in stack.core.messages for request in message.operator_requests][-1]


def test_a_reader_gets_the_parts_and_its_end_ends_the_view(tmp_path: Path) -> None:
    """A caller that leaves ends its view at the core; a lost core ends the call, with advice to watch again."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            operator = admin_pb2_grpc.AdminServiceStub(stack.channel)
            calls, numbers = [], []
            for _ in range(2):
                calls.append(operator.WatchSteps(admin.WatchStepsRequest()))
                numbers.append(await _watching(stack, calls[-1]))
            for first in (1, 4):
                _say(stack, _part(numbers[0], first, 3))
                response = await _read(calls[0])
                assert [step.step for step in response.steps] == [first, first + 1, first + 2]
                assert not response.dropped_steps
            calls[0].cancel()
            await stack.core.saw(lambda core: any(numbers[0] in message.ended_orders for message in core.messages))
            stack.core.forget_frontends.set()
            with pytest.raises(aio.AioRpcError) as refusal:
                await _read(calls[1])
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "watch again" in str(refusal.value.details())

    asyncio.run(main())


def test_a_view_that_fails_at_the_core_ends_with_its_error(tmp_path: Path) -> None:
    """An error that the core reports later ends the call."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            call = admin_pb2_grpc.AdminServiceStub(stack.channel).WatchSteps(admin.WatchStepsRequest())
            reply = link_pb2.OperatorReply(number=await _watching(stack, call))
            reply.error.reason, reply.error.message = NotReadyError.reason, "watch: the view failed"
            message = link_pb2.CoreMessage(incarnation=stack.core.incarnation, operator_replies=[reply])
            stack.core.say(message.SerializeToString())
            with pytest.raises(aio.AioRpcError) as refusal:
                await _read(call)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the view failed" in str(refusal.value.details())

    asyncio.run(main())


def test_a_reader_that_pauses_learns_how_many_steps_it_has_missed(tmp_path: Path) -> None:
    """Parts that a slow caller does not read are dropped; received and missed parts add up to all parts."""
    num_parts, per_part = 400, 5

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            operator = admin_pb2_grpc.AdminServiceStub(stack.channel)
            call = operator.WatchSteps(admin.WatchStepsRequest())
            number = await _watching(stack, call)
            for index in range(num_parts):
                _say(stack, _part(number, index * per_part, per_part, padding=2000))
            # The response follows everything that the core sent before.
            while stack.core.unsaid:
                await operator.ListWorkers(admin.ListWorkersRequest())
            await operator.ListWorkers(admin.ListWorkersRequest())
            seen = dropped = last = 0
            while last < num_parts * per_part - 1:
                response = await _read(call)
                for step in response.steps:
                    last = step.step
                seen += len(response.steps)
                dropped += response.dropped_steps

            assert dropped > 0
            assert seen + dropped == num_parts * per_part
            call.cancel()

    asyncio.run(main())


def test_what_is_not_read_is_bounded() -> None:
    """A view holds so many bytes and parts at most, keeps the newest, and passes on what the core had dropped."""

    async def main() -> None:
        view = LiveView()
        size = MAX_UNREAD_BYTES // 4
        for index in range(6):
            view.put(link_pb2.View(number=1, response=bytes([index]) + bytes(size - 1), steps=10))
        part, dropped = await view.next()
        assert (part[0], dropped) == (2, 20)
        for _ in range(3):
            assert (await view.next())[1] == 0
        for index in range(MAX_UNREAD_PARTS + 3):
            view.put(link_pb2.View(number=1, response=bytes([index]), steps=2))
        assert await view.next() == (bytes([3]), 6)
        view.fail(NotReadyError("gone"))
        with pytest.raises(NotReadyError):
            await view.next()

    asyncio.run(main())
