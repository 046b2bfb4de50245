"""gRPC boundary: parses requests, authenticates callers, and turns exceptions into statuses.

gRPC returns INTERNAL or UNKNOWN, without details, if a request does not parse or a handler raises. Therefore
`tolerant_parser` yields a `MalformedRequest` instead of raising, and a guard wraps every handler. Only the guard
authenticates callers, maps errors to statuses, logs unexpected errors and counts calls. It rejects calls beyond a
principal's share before any other work.

gRPC itself receives the request of a call before its handler starts, without limits of time and number: a client that
sends all but the last byte of many requests would fill the memory. Therefore the wrapped handlers are those of streams,
which read the request themselves (`Receiver`) after the caller is authenticated.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
from google.protobuf import empty_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc import aio

from services.access.principals import CURRENT, Principals
from services.access.shares import SMALL_REQUEST_BYTES, Share, Shares, owner_of
from services.access.tls import grpc_names
from services.calls.context import Caller
from services.calls.load_reports import TRAILER, LoadReports
from services.calls.tracing import TRACEPARENT_KEY, Operation
from services.errors import InternalError, to_status
from shared.errors import FieldViolation, InvalidRequestError, QuireError, UnsupportedMethodError
from shared.ids import draw_error_id
from shared.logging import get_logger

OUR_METHODS = ("/quire.", "/vllm.grpc.engine.")
"""Prefixes of the methods that the guard wraps. Other services (health, reflection) handle errors themselves."""
ADMIN_METHODS = "/quire.admin."
"""Prefix of the operator methods, which are exempt from the limit of concurrent calls."""

_FAST_S = 1.0
"""Time within which a request arrives unless its client is slow, s."""
_RECEIVE_TIMEOUT_S = 60.0
"""Maximum time to receive a request, s; equal to that for an HTTP body."""
_LENGTH_DELIMITED = 2
"""Wire type of length-delimited fields."""
_MAX_NESTING = 8
"""Maximum depth of messages that are searched for invalid UTF-8."""

# These classes are generic only in their type stubs.
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """Placeholder for a request whose bytes do not parse."""

    field: str
    description: str


class Boundary(aio.ServerInterceptor):
    """Server interceptor that wraps every handler of Quire's own services."""

    def __init__(
        self,
        on_outcome: Callable[[str, str, str, float], None],
        shares: Shares,
        principals: Principals,
        reports: LoadReports,
    ) -> None:
        """Create the interceptor.

        Args:
            on_outcome: called with method, status code, error type and seconds for each finished RPC.
            shares: limits what each principal holds.
            principals: authenticates callers.
            reports: the newest load report, which responses get as a trailer; None if reports are off.
        """
        self._reports = reports
        self._principals = principals
        self._on_outcome = on_outcome
        self._shares = shares
        self._receiver = Receiver(shares.slow_requests)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the handler wrapped in the guard, with tolerant_parser parsing."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        serve = handler.stream_stream or handler.unary_stream or handler.unary_unary
        parse, write = handler.request_deserializer, handler.response_serializer
        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        if not method.startswith(OUR_METHODS):
            receive = self._receiver.streaming if handler.request_streaming else self._receiver.single
            return wrap(receive(serve), parse, write)
        # The deserializer of generated code is the bound `FromString` of the request's class.
        parse = tolerant_parser(getattr(parse, "__self__"))  # noqa: B009
        guarded = self._guard(method, serve, is_single=not handler.request_streaming)
        return wrap(guarded, parse, write)

    def _identify(self, method: str, context: Context) -> str:
        """Authenticate the caller, check its permission for the method, set `CURRENT`, and return its name.

        Raises:
            QuireError: the credentials are missing, unknown or not sufficient.
        """
        metadata = dict(context.invocation_metadata() or ())
        principal = self._principals.identify(
            str(metadata.get("authorization", "")), grpc_names(context.auth_context())
        )
        if method.startswith(ADMIN_METHODS):
            principal.check_admin()
        CURRENT.set(principal)
        return principal.name

    def _guard(self, method: str, handler: Any, *, is_single: bool) -> Any:
        name = method.rpartition("/")[2]
        limited = not method.startswith(ADMIN_METHODS)

        async def guarded(requests: AsyncIterator[Any], context: Context) -> object:
            code, failure, began = "", None, time.monotonic()
            request: Any = requests
            try:
                principal = self._identify(method, context)
                if is_single:
                    request = await self._receiver.receive(context)
                with self._shares.calls.holding(principal) if limited else contextlib.nullcontext():
                    if isinstance(request, Message) and request.ByteSize() > SMALL_REQUEST_BYTES:
                        await self._shares.large_bodies.begin_work(principal)
                    if isinstance(request, MalformedRequest):
                        raise InvalidRequestError(FieldViolation(request.field, request.description))
                    response = await handler(request, context)
                if self._reports.newest is not None:
                    context.set_trailing_metadata(((TRAILER, self._reports.newest.to_bytes()),))
                code = "OK"
                return response
            except QuireError as error:
                failure = error.without_frames()
            except NotImplementedError:
                failure = UnsupportedMethodError(f"{name}: not supported by this version")
            except Exception as unexpected:
                if context.cancelled():
                    return None  # Ignore errors, because a write to a disconnected client fails in several ways.
                failure = InternalError(draw_error_id())
                get_logger().error("handler failed", method=name, error_id=failure.error_id, exc_info=unexpected)
            finally:
                code = code or (failure.code if failure else cancel_code(context))
                error_type = failure.reason if failure else code if code != "OK" else ""
                self._on_outcome(method.removeprefix("/"), code, error_type, time.monotonic() - began)
            # gRPC retains the finished call and its request until the client has read all messages before the status.
            if isinstance(request, Message):
                request.Clear()
            await context.abort_with_status(to_status(failure))
            return None

        return guarded


class Receiver:
    """Receives requests; limits how many may arrive slowly, and how slowly."""

    def __init__(self, slow: Share) -> None:
        self._slow = slow

    async def receive(self, context: Context, *, may_end: bool = False) -> Any:
        """Return the next request of a call; EOF after the last one if the call may end here.

        Raises:
            InvalidRequestError: the client ended the call without a request, or sends it too slowly.
            OverloadedError: too many requests arrive slowly from the client's address.
        """
        # The reading is never cancelled, because gRPC would write to its memory. It ends with the call.
        reading = asyncio.ensure_future(context.read())
        reading.add_done_callback(_retrieve_exception)
        # After a stall of this process, the first wait ends even if the request has arrived. The second does not.
        for _ in range(2):
            if not reading.done():
                await asyncio.wait((reading,), timeout=_FAST_S / 2)
        if not reading.done():
            with self._slow.holding(owner_of(_address_of(context.peer()))):
                await asyncio.wait((reading,), timeout=_RECEIVE_TIMEOUT_S)
        if not reading.done():
            what = f"not complete after {_RECEIVE_TIMEOUT_S:g} s; send it without pauses"
            raise InvalidRequestError(FieldViolation("request", what))
        request = reading.result()
        if request is aio.EOF and not may_end:
            raise InvalidRequestError(FieldViolation("request", "missing; send one message"))
        return request

    def single(self, handler: Any) -> Any:
        """Return a handler that receives one request for a handler of another service."""

        async def received(_: AsyncIterator[Any], context: Context) -> object:
            try:
                request = await self.receive(context)
            except QuireError as error:
                await context.abort_with_status(to_status(error))
            return await handler(request, context)

        return received

    def streaming(self, handler: Any) -> Any:
        """Return a handler that receives the requests for a handler of another service, which streams responses."""

        async def requests(context: Context) -> AsyncIterator[Any]:
            try:
                while (request := await self.receive(context, may_end=True)) is not aio.EOF:
                    yield request
            except QuireError as error:
                await context.abort_with_status(to_status(error))

        async def received(_: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for response in handler(requests(context), context):
                yield response

        return received


def _address_of(peer: str) -> str:
    """Return the address in gRPC's name of a peer, such as "ipv4:127.0.0.1:50000" or "ipv6:%5B::1%5D:50000"."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _retrieve_exception(reading: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, so that asyncio does not report it as never retrieved."""
    if not reading.cancelled():
        reading.exception()


def make_caller(context: Context, operation: Operation) -> Caller:
    """Return the caller of an RPC: traceparent, arrival time and deadline."""
    metadata = dict(context.invocation_metadata() or ())
    arrival, left = time.monotonic(), context.time_remaining()
    return Caller(
        operation=operation,
        traceparent=str(metadata.get(TRACEPARENT_KEY, "")),
        arrival=arrival,
        deadline=None if left is None else arrival + left,
    )


def cancel_code(context: Context) -> str:
    """Return the status code of a cancelled handler: its deadline passed, or the client disconnected."""
    left = context.time_remaining()
    return "DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED"


def tolerant_parser(message_type: type[Message]) -> Callable[[bytes], Message | MalformedRequest]:
    """Return a deserializer that returns a MalformedRequest where the generated deserializer raises an exception."""

    def parse(serialized: bytes) -> Message | MalformedRequest:
        try:
            return message_type.FromString(serialized)
        except DecodeError:
            field = _invalid_utf8_field(message_type.DESCRIPTOR, serialized)
            if field is not None:
                return MalformedRequest(field, "invalid UTF-8; send UTF-8 text")
            return MalformedRequest("request", f"not a valid serialized {message_type.DESCRIPTOR.full_name}")

    return parse


def _invalid_utf8_field(descriptor: Any, serialized: bytes, depth: int = 0) -> str | None:
    """Return the path of the first string field with invalid UTF-8, or None.

    It reads the wire format without types, because the typed parser stops at the error.
    """
    if depth == _MAX_NESTING:
        return None
    try:
        fields: Any = UnknownFieldSet(empty_pb2.Empty.FromString(serialized))
    except DecodeError:
        return None
    for unknown in fields:
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            return str(field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _invalid_utf8_field(field.message_type, unknown.data, depth + 1)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
