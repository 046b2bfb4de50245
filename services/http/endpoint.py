"""One HTTP exchange from its body to its end.

What the gRPC boundary is for RPCs, `Endpoints` is here: the one place where errors become answers, where unexpected
ones are logged and calls are counted. A client that leaves cancels its request, wherever that is; a deadline in the
header `X-Request-Timeout` (seconds) does so with 504. Bodies are bounded in size and in the time they may take.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from services.calls import CallsInProgress
from services.context import Caller
from services.delivery import FAREWELL_S
from services.errors import RETRY_MS, InternalError
from services.http import errors
from services.http.server import ABORT_KEY, NAMES_KEY
from services.principals import CURRENT, Principals
from services.tracing import TRACEPARENT_KEY, Operation
from shared.errors import (
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    QuireError,
    StalledReaderError,
)
from shared.ids import draw_error_id
from shared.logging import get_logger

MAX_BODY_BYTES = 8 << 20
"""As large as a gRPC request may be."""
BODY_TIMEOUT_S = 60.0
TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 365 * 24 * 3600.0

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_CANCELLED = "CANCELLED"


class ClientGoneError(Exception):
    """The client has left; there is nobody to answer."""


class Exchange:
    """A request and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, route: str = "") -> None:
        """`route` is the path as it is configured, parameters by name."""
        self.path: str = scope["path"]
        self._scheme: str = scope.get("scheme", "http")
        self._method: str = scope.get("method", "")
        self._route = route
        self.params: Mapping[str, str] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self.arrival = time.monotonic()
        self.request_id = ""
        """Goes into the answer's header `x-request-id` once it is known."""
        self._receive = receive
        self._send = send
        self.certificate_names: list[str] = scope.get(NAMES_KEY, [])
        """Of the client's certificate, if it has shown one."""
        self._abort: Callable[[], None] = scope.get(ABORT_KEY, lambda: None)
        self.started = False
        self._streaming = False
        self.deadline: float | None = None
        """Monotonic time until which the client wants its answer."""

    def caller(self) -> Caller:
        """Who asks."""
        return Caller(
            operation=self._operation(),
            traceparent=self.headers.get(TRACEPARENT_KEY, ""),
            arrival=self.arrival,
            deadline=self.deadline,
        )

    def _operation(self) -> Operation:
        """What this is to those who trace it, as OpenTelemetry's conventions for HTTP say."""
        attributes = {
            "http.request.method": self._method,
            "http.route": self._route,
            "url.path": self.path,
            "url.scheme": self._scheme,
        }
        return Operation(
            name=f"{self._method} {self._route}",
            attributes=attributes,
            status_key="http.response.status_code",
            status_of=errors.status_of,
            internal=500,
            success=200,
        )

    def read_deadline(self) -> None:
        """Takes the deadline from the header.

        Raises:
            InvalidRequestError: it is no number of seconds.
        """
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidRequestError(FieldViolation("X-Request-Timeout", "must be a number of seconds above 0"))
        self.deadline = self.arrival + seconds

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            TooLargeError: it is too large.
            SlowBodyError: it takes too long.
            ClientGoneError: the client left before its end.
        """
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        chunks = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunks += message.get("body", b"")
                    if len(chunks) > MAX_BODY_BYTES:
                        raise _too_large()
                    if not message.get("more_body", False):
                        return bytes(chunks)
        except TimeoutError:
            raise errors.SlowBodyError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None

    async def until_gone(self, work: Awaitable[None]) -> None:
        """Does the work, unless the client leaves before its end. To be called when the body has been read.

        Raises:
            ClientGoneError: the client left; the work was cancelled.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGoneError
            await working
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def answer(self, content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Sends a whole answer as JSON."""
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        await self._start(status, _JSON, {"content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, content: Any) -> None:
        """Sends one event of a stream; returns when there is room for the next one."""
        if not self.started:
            self._streaming = True
            await self._start(200, _EVENTS, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        await self._send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

    async def end_events(self) -> None:
        """Ends a stream of events."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, error: QuireError) -> None:
        """Tells the client what went wrong, in whatever form is still possible, if it listens."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                if not self.started:
                    status, headers = errors.status_of(error), errors.headers_of(error)
                    await self.answer(errors.answer_of(error), status=status, headers=headers)
                elif self._streaming and not isinstance(error, StalledReaderError):
                    await self.event(errors.answer_of(error))
                    await self.end_events()
                else:
                    await self.abort()
        except TimeoutError:
            await self.abort()

    async def abort(self) -> None:
        """Drops the connection, with whatever its reader has not taken."""
        self._abort()
        await self._gone()

    async def _start(self, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        self.started = True
        all_headers = dict(headers)
        if self.request_id:
            # A header's value neither begins nor ends with blanks.
            all_headers["x-request-id"] = self.request_id.strip()
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()]
        start: Message = {"type": "http.response.start", "status": status}
        await self._send({**start, "headers": [(b"content-type", content_type), *pairs]})

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoints:
    """What the endpoints of one process share; makes an ASGI application of a handler."""

    def __init__(self, calls: CallsInProgress, on_outcome: Callable[[str, str], None], principals: Principals) -> None:
        """`calls` bounds how many are in progress; `on_outcome` is told path and gRPC code of each; `principals` says
        who calls."""
        self._principals = principals
        self._calls = calls
        self._on_outcome = on_outcome
        self._stopping = False
        self._live: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def endpoint(self, name: str, handler: Handler) -> "Endpoint":
        """The application for one path; `name` is the path as metrics have it."""
        return Endpoint(self, name, handler)

    async def drain(self, grace_s: float) -> None:
        """Refuses what is new; what is in progress may end within the grace period, then it is cancelled."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        live = list(self._live)
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)

    async def serve(self, name: str, handler: Handler, exchange: Exchange) -> None:
        """Runs a handler and answers its errors."""
        task = asyncio.current_task()
        assert task is not None
        self._live.add(task)
        self._idle.clear()
        try:
            failure = await self._outcome(name, handler, exchange)
            if failure is not None:
                await exchange.fail(failure)
        except ClientGoneError:
            pass
        finally:
            self._live.discard(task)
            if not self._live:
                self._idle.set()

    async def _outcome(self, name: str, handler: Handler, exchange: Exchange) -> QuireError | None:
        """Why the handler failed; None when it did not."""
        code, failure = _CANCELLED, None
        try:
            with self._calls.one_more():
                if self._stopping:
                    raise _shutting_down()
                authorization = exchange.headers.get("authorization", "")
                CURRENT.set(self._principals.identify(authorization, exchange.certificate_names))
                exchange.read_deadline()
                async with asyncio.timeout_at(_loop_time(exchange.deadline)):
                    await handler(exchange)
            code = "OK"
        except ClientGoneError:
            raise
        except QuireError as error:
            failure = error
        except TimeoutError:
            failure = DeadlineError("the deadline passed before the answer was complete")
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            failure = _shutting_down()
        except Exception as unexpected:
            failure = InternalError(draw_error_id())
            get_logger().error("handler failed", method=name, error_id=failure.error_id, exc_info=unexpected)
        finally:
            self._on_outcome(name, failure.code if failure else code)
        return failure


class Endpoint:
    """An ASGI application."""

    def __init__(self, endpoints: Endpoints, name: str, handler: Handler) -> None:
        self._endpoints = endpoints
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = Exchange(scope, receive, send, route=self._name)
        await self._endpoints.serve(self._name, self._handler, exchange)


def _loop_time(deadline: float | None) -> float | None:
    """The event loop's time at a monotonic time."""
    if deadline is None:
        return None
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def _too_large() -> errors.TooLargeError:
    return errors.TooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")


def _shutting_down() -> NotReadyError:
    return NotReadyError("the service is shutting down", retry_ms=RETRY_MS)
