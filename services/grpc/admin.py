"""`quire.admin.v1.AdminService`: forwards every call to the core without decoding it.

`scheduler_svc/operator.py` answers it, and `scheduler_svc/live_views.py` answers a call with many responses.
"""

from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2
from services.grpc.boundary import Context
from services.link.core_link import OPERATOR_TIMEOUT_S, CoreLink
from shared.errors import UnsupportedMethodError

_SLOW = {"ExplainRequest": 60.0, "CompareStrategiesRequest": 60.0}
"""Calls that read the scheduler's record, with the time to wait for their answers, s."""
SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


def add_admin_service(server: aio.Server, link: CoreLink) -> None:
    """Serve every method of the operator API by passing it to the core."""
    handlers = {}
    for method in SERVICE.methods:
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _watch(link), request.FromString, response.SerializeToString
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                _forward(link, response), request.FromString, response.SerializeToString
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _forward(link: CoreLink, response_type: type[Message]) -> Callable[[Message, Context], Awaitable[Message]]:
    async def handler(request: Message, context: Context) -> Message:
        order = link_pb2.OperatorRequest()
        order.call.Pack(request)
        timeout_s = _SLOW.get(type(request).__name__, OPERATOR_TIMEOUT_S)
        reply, response = await link.operate(order, timeout_s), response_type()
        if not reply.response.Unpack(response):
            raise UnsupportedMethodError("scheduler: does not support this call; upgrade it to the front end's version")
        return response

    return handler


def _watch(link: CoreLink) -> Callable[[Message, Context], Awaitable[None]]:
    async def handler(request: Message, context: Context) -> None:
        order = link_pb2.OperatorRequest()
        order.call.Pack(request)
        async with link.watch(order) as view:
            await context.write(admin_pb2.WatchStepsResponse())
            while True:
                part, dropped = await view.next()
                response = admin_pb2.WatchStepsResponse.FromString(part)
                response.dropped_steps += dropped
                await context.write(response)

    return handler
