"""One HTTP exchange, from receiving the body to the end.

`Endpoints` is the counterpart of the gRPC boundary. Only this module converts errors to responses, logs unexpected
errors and counts calls. If the client disconnects at any stage, its request is cancelled. After the deadline in the
header `X-Request-Timeout` (seconds), the request is cancelled with 504. The body's size and the time to receive it are
limited.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from services.access.principals import CURRENT, Principals
from services.access.shares import SMALL_REQUEST_BYTES, Shares, Slices, Turns
from services.calls.context import Caller
from services.calls.delivery import FINAL_WRITE_TIMEOUT_S
from services.calls.tracing import TRACEPARENT_KEY, Operation
from services.errors import RETRY_MS, InternalError
from services.http import errors
from services.http.json_pieces import json_pieces
from services.http.query import Query
from services.http.server import ABORT_KEY, NAMES_KEY
from shared.errors import (
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    QuireError,
    StalledReaderError,
)
from shared.ids import draw_error_id, draw_request_id
from shared.logging import get_logger

MAX_BODY_BYTES = 8 << 20
"""Maximum size of a body, bytes; equal to the limit for a gRPC request."""
BODY_TIMEOUT_S = 60.0
"""Maximum time to receive a body, seconds."""
TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 365 * 24 * 3600.0
"""Maximum value of X-Request-Timeout, seconds."""

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_CANCELLED = "CANCELLED"

Parsed = TypeVar("Parsed")


class ClientGoneError(Exception):
    """The client has disconnected."""


class Exchange:
    """A request, with methods to read it and to respond to it."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        route: str = "",
        dialect: errors.Dialect = errors.COMPLETIONS,
    ) -> None:
        """Create the exchange.

        Args:
            scope: ASGI's description of the request.
            receive: receives its messages.
            send: sends messages.
            route: the configured path with names of parameters.
            dialect: how errors are written.
        """
        self._dialect = dialect
        self.path: str = scope["path"]
        self.scheme: str = scope.get("scheme", "http")
        self.method: str = scope.get("method", "")
        self._route = route
        self.params: Mapping[str, str] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self._query: bytes = scope.get("query_string", b"")
        self.arrival = time.monotonic()
        self.request_id = ""
        """Value of the response header `x-request-id` once it is known."""
        self._receive = receive
        self._send = send
        self.certificate_names: list[str] = scope.get(NAMES_KEY, [])
        """Names in the client's certificate; empty without one."""
        self._abort: Callable[[], None] = scope.get(ABORT_KEY, lambda: None)
        self._body_pending = _has_body(self.headers)
        self._admit: Callable[[], None] = lambda: None
        self._principal = ""
        self._slices: Slices | None = None
        """Runs long work of the caller; None until the caller is known."""
        self.started = False
        self._streaming = False
        self._num_events = 0
        self._ended = False
        """Whether the response is complete, so that nothing can be added."""
        self.deadline: float | None = None
        """Monotonic time, seconds; None for no deadline."""

    @property
    def query(self) -> Query:
        """The options in the URL.

        Raises:
            InvalidRequestError: see `Query`.
        """
        return Query(self._query)

    def caller(self) -> Caller:
        return Caller(
            operation=self._operation(),
            traceparent=self.headers.get(TRACEPARENT_KEY, ""),
            arrival=self.arrival,
            deadline=self.deadline,
        )

    @property
    def authorization(self) -> str:
        """The Authorization header; Anthropic's clients send the token in `x-api-key`."""
        key = self.headers.get("x-api-key", "")
        return self.headers.get("authorization", "") or (f"Bearer {key}" if key else "")

    def _operation(self) -> Operation:
        """Return the span name and attributes, by OpenTelemetry's conventions for HTTP."""
        attributes = {
            "http.request.method": self.method,
            "http.route": self._route,
            "url.path": self.path,
            "url.scheme": self.scheme,
        }
        return Operation(
            name=f"{self.method} {self._route}",
            attributes=attributes,
            status_key="http.response.status_code",
            status_of=errors.status_of,
            internal=500,
            success=200,
        )

    def admit_when_complete(self, shares: Shares, principal: str, held: contextlib.ExitStack) -> None:
        """Count a principal's call as soon as its body is complete. Until then, count the bytes of the body.

        A client that sends slowly therefore occupies a connection and the received bytes, but no call.

        Raises:
            OverloadedError: there is no body, and the principal has its share of calls already.
        """
        self._shares, self._principal, self._slices = shares, principal, shares.slices
        self._admit = lambda: held.enter_context(shares.calls.holding(principal))
        if not self._body_pending:
            self._admit()

    def read_deadline(self) -> None:
        """Read the deadline from the header.

        Raises:
            InvalidRequestError: the header is not a valid number of seconds.
        """
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_TIMEOUT_S:
            raise InvalidRequestError(
                FieldViolation("X-Request-Timeout", f"must be a number of seconds > 0 and <= {MAX_TIMEOUT_S:.0f}")
            )
        self.deadline = self.arrival + seconds

    async def read(self, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Return the whole body, parsed; its Content-Type must be JSON.

        Raises:
            ContentTypeError: it has another type. Pages of other origins can send some types without a preflight.
            TooLargeError: it is too large.
            OverloadedError: the principal already uses its share of calls, or of bytes being received.
            SlowBodyError: it arrives too slowly.
            QuireError: `parse` refuses it.
            ClientGoneError: the client disconnected.
        """
        self._check_content_type()
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        received = bytearray()
        try:
            await self._receive_body(received)
            self._admit()
            if len(received) <= SMALL_REQUEST_BYTES:
                return parse(bytes(received))
            return await self._in_turn(parse, bytes(received))
        finally:
            if received:
                self._shares.body_bytes.give_back(self._principal, len(received))

    async def _receive_body(self, received: bytearray) -> None:
        """Receive the body, whose bytes count against the principal's share."""
        share = self._shares.body_bytes
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while self._body_pending:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    chunk = message.get("body", b"")
                    if len(received) + len(chunk) > MAX_BODY_BYTES:
                        raise _too_large()
                    if chunk and not share.take(self._principal, len(chunk)):
                        raise share.exhausted()
                    received += chunk
                    self._body_pending = message.get("more_body", False)
        except TimeoutError:
            raise errors.SlowBodyError(
                f"body: not complete after {BODY_TIMEOUT_S:g} s; send it without pauses"
            ) from None

    async def _in_turn(self, parse: Callable[[bytes], Parsed], raw: bytes) -> Parsed:
        """Parse a large body, which blocks the event loop. Principals take turns, with pauses for other work."""
        turns = self._shares.large_bodies
        await self._acquire(turns)
        turns.release_after_work()
        return parse(raw)

    async def _acquire(self, turns: Turns) -> None:
        """Wait for a place.

        Raises:
            ClientGoneError: the client disconnected before.
        """
        acquiring = asyncio.ensure_future(turns.acquire(self._principal))
        leaving = asyncio.ensure_future(self._disconnected())
        has_place = False
        try:
            await asyncio.wait((acquiring, leaving), return_when=asyncio.FIRST_COMPLETED)
            has_place = acquiring.done()
        finally:
            leaving.cancel()
            if not has_place and not acquiring.cancel():
                turns.release()
        if not has_place:
            raise ClientGoneError

    def _check_content_type(self) -> None:
        given = self.headers.get("content-type", "")
        media_type = given.partition(";")[0].strip().lower()
        if media_type != "application/json":
            what = f"{given[:100]!r} is not supported" if given else "missing"
            raise errors.ContentTypeError(f"Content-Type: {what}; send 'Content-Type: application/json'")
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise errors.ContentTypeError(
                f"Content-Encoding: {encoding[:100]!r} is not supported; send the body without compression"
            )

    async def run_until_disconnect(self, work: Awaitable[None]) -> None:
        """Run `work`; cancel it if the client disconnects. Call this after the body has been read.

        Raises:
            ClientGoneError: the client disconnected; the work was cancelled.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._disconnected())
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
        """Send a complete response as JSON."""
        body = (await self._json(content)).encode(errors="replace")
        await self._start(status, _JSON, {"content-length": str(len(body)), **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})
        self._ended = True

    async def _json(self, content: Any) -> str:
        pieces = json_pieces(content)
        if self._slices is None:
            return "".join(pieces)
        return "".join(await self._slices.run(self._principal, pieces))

    async def event(self, content: Any, *, large: bool = False) -> None:
        """Send one server-sent event; return when the next event can be sent.

        Args:
            content: the event.
            large: it may take long to write.
        """
        if not self.started:
            self._streaming = True
            await self._start(200, _EVENTS, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        if large:
            text = await self._json(content)
        else:
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        self._num_events += 1
        name = f"event: {content['type']}\n" if self._dialect.names_events else ""
        body = f"{name}data: {text}\n\n".encode(errors="replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self, *last: Any, timeout_s: float = 0.0) -> None:
        """Send the last events and end the stream. A timeout of 0 waits for the client without limit.

        While a stream is live, the generator detects a client that does not read. After that, this timeout applies.

        Raises:
            StalledReaderError: the client did not read them in time.
        """
        try:
            async with asyncio.timeout(timeout_s or None):
                for content in last:
                    await self.event(content)
                await self._end()
        except TimeoutError:
            raise StalledReaderError(
                "the client read no data for too long; read the stream without long pauses"
            ) from None

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"" if self._dialect.names_events else _DONE})
        self._ended = True

    async def fail(self, error: QuireError) -> None:
        """Report an error to the client, as a response or, if the response has begun, in the stream."""
        if self._ended:
            return  # For example, the deadline passed while the handler cleaned up.
        self.request_id = self.request_id or draw_request_id()
        try:
            async with asyncio.timeout(FINAL_WRITE_TIMEOUT_S):
                if not self.started:
                    status, headers = errors.status_of(error), errors.headers_of(error)
                    await self.answer(self._dialect.error(error, self.request_id), status=status, headers=headers)
                elif self._streaming and not isinstance(error, StalledReaderError):
                    await self.event(self._dialect.error_event(error, self.request_id, self._num_events))
                    await self.end_events()
                else:
                    await self.abort()
        except TimeoutError:
            await self.abort()

    async def abort(self) -> None:
        """Drop the connection with everything that the client has not read."""
        self._abort()
        await self._disconnected()

    async def _start(self, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        self.started = True
        all_headers = dict(headers)
        if self.request_id:
            # A header value must not begin or end with whitespace.
            all_headers |= dict.fromkeys(self._dialect.id_headers, self.request_id.strip())
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in all_headers.items()]
        start: Message = {"type": "http.response.start", "status": status}
        await self._send({**start, "headers": [(b"content-type", content_type), *pairs]})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Exchange], Awaitable[None]]
OnOutcome = Callable[[str, str, str, int, str, float], None]


class Endpoints:
    """State shared by the endpoints of one process; wraps a handler as an ASGI application."""

    def __init__(self, shares: Shares, on_outcome: OnOutcome, principals: Principals) -> None:
        """Create the endpoints.

        Args:
            shares: limits what one principal holds.
            on_outcome: called with route, method, scheme, status, error type and seconds for each finished call.
            principals: authenticates callers.
        """
        self._principals = principals
        self._shares = shares
        self._on_outcome = on_outcome
        self._stopping = False
        self._live: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def endpoint(self, name: str, handler: Handler, dialect: errors.Dialect = errors.COMPLETIONS) -> "Endpoint":
        """Return the application for one path; `name` is the path in metrics."""
        return Endpoint(self, name, handler, dialect)

    async def drain(self, grace_s: float) -> None:
        """Reject new calls, let running calls finish within the grace period, then cancel the remaining calls."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        live = list(self._live)
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)

    async def serve(self, name: str, handler: Handler, exchange: Exchange) -> None:
        """Run a handler, and send its errors as responses."""
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
        """Return the error of the handler, or None."""
        status, error_type, failure = 0, _CANCELLED, None
        try:
            with contextlib.ExitStack() as held:
                if self._stopping:
                    raise _shutting_down()
                principal = self._principals.identify(exchange.authorization, exchange.certificate_names)
                CURRENT.set(principal)
                exchange.admit_when_complete(self._shares, principal.name, held)
                exchange.read_deadline()
                async with asyncio.timeout_at(_loop_time(exchange.deadline)):
                    await handler(exchange)
            status, error_type = 200, ""
        except ClientGoneError:
            raise
        except QuireError as error:
            failure = error.without_frames()
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
            if failure is not None:
                status, error_type = errors.status_of(failure), failure.reason
            seconds = time.monotonic() - exchange.arrival
            self._on_outcome(name, exchange.method, exchange.scheme, status, error_type, seconds)
        return failure


class Endpoint:
    """ASGI application of one path."""

    def __init__(self, endpoints: Endpoints, name: str, handler: Handler, dialect: errors.Dialect) -> None:
        self._dialect = dialect
        self._endpoints = endpoints
        self._name = name
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(scope, receive, send, route=self._name, dialect=self._dialect)
        await self._endpoints.serve(self._name, self._handler, exchange)


def _loop_time(deadline: float | None) -> float | None:
    """Convert a monotonic time to the time of the event loop."""
    if deadline is None:
        return None
    return asyncio.get_running_loop().time() + deadline - time.monotonic()


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _too_large() -> errors.TooLargeError:
    return errors.TooLargeError(f"body: larger than {MAX_BODY_BYTES} bytes; split the request")


def _shutting_down() -> NotReadyError:
    return NotReadyError("the service is shutting down; try again later", retry_ms=RETRY_MS)
