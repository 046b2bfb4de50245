"""HTTP server: uvicorn on the front end's event loop, and the listening socket that front ends on a machine share."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from starlette.applications import Starlette
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.access.shares import Shares, owner_of
from services.access.tls import ServerTls, http_names
from services.http.request_head import HeadError, check_head

KEEP_ALIVE_S = 75
"""Maximum idle time of a connection, including the time before its first request, s.

If the server closes a connection while a request is being sent, the client gets an error. Clients close pooled
connections after at most a minute, so with this timeout they close first.
"""
HEAD_TIMEOUT_S = 60.0
"""Maximum time to receive the head of a request (request line and headers), seconds."""
LINGER_S = 5.0
"""Maximum time to receive the rest of a body after its request was answered, seconds.

Closing the connection immediately would reset it, and the client might not see the response.
"""
MAX_HEAD_BYTES = 64 << 10
"""Approximate maximum size of a request head, bytes; the parser itself has no limit.

The overhead in a body (chunk sizes, extensions, trailers) has the same limit, plus the size of the content.
"""
_MAX_HEADERS = 1024
"""Maximum number of headers and trailers in a request; each takes about a microsecond."""
_MAX_PIECES = 1 << 14
"""Maximum number of chunks per read of at most 256 KiB. Each takes about a fifth of a microsecond."""
_MAX_PIPELINED = 16
"""Maximum number of pipelined requests that wait for the response to an earlier request on their connection."""
_MAX_UNPARSED_BYTES = 64 << 20
"""Maximum size of received data that connections may not parse yet, bytes."""
_REQUEST_S = 0.0002
"""Approximate time to refuse a request, s; added to the time for parsing."""
_DATE_INTERVAL_S = 1.0
ABORT_KEY = "quire.abort"
"""Scope entry: a function that drops the connection with everything that the client has not read."""
NAMES_KEY = "quire.certificate_names"
"""Scope entry: names in the client's certificate, which TLS has verified."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handling; `services.frontend` decides how the process ends."""

    def __init__(self, app: Starlette, tls: ServerTls | None = None, shares: Shares | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(_Protocol, shares=shares)),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = tls.http_context() if tls is not None else None
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make `serve` shut down and return."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Update the Date header once a second until `stop`. uvicorn's own loop wakes ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATE_INTERVAL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _StopParsingError(Exception):
    """The connection is refused. The rest of the received data is not parsed."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for heads, framing and pipelines, abort and certificate names.

    Applications need `abort` because closing a connection may wait forever for a client that does not read.

    Connections beyond their address's share are closed immediately. If an address has used up its share of the event
    loop, its data is parsed later, because small requests, chunks and headers take far longer to parse than to send.
    """

    def __init__(self, *args: Any, shares: Shares | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shares = shares
        self._address = ""
        """Address that is charged for the connection; empty for none."""
        self._unfinished: list[RequestResponseCycle] = []
        """Requests with incomplete responses, in order. uvicorn tracks only the last request in a pipeline."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, after the TLS handshake."""
        super().connection_made(transport)
        if self._shares is not None:
            address = owner_of(str((transport.get_extra_info("peername") or ("",))[0]))
            if self._shares.connections.take(address):
                self._address = address
                self._shares.parsing.charge(address, _REQUEST_S)
            else:
                transport.abort()
        self._names = http_names(transport.get_extra_info("peercert"))
        self._in_head = self._in_message = self._refused = False
        self._refusal = b""
        """Error to send after the responses to earlier requests, before the connection is closed; empty if none."""
        self._num_messages = self._num_headers = 0
        self._head_bytes = 0
        """Bytes of the headers that the parser has found."""
        self._pending_head_bytes = 0
        """Bytes received for a head that is not complete."""
        self._pieces: list[bytes] = []
        """Parts of the body in the current read."""
        self._body_bytes = 0
        self._received_bytes = 0
        """Bytes received after the read with the end of the head."""
        self._unparsed = bytearray()
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(KEEP_ALIVE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_timer()
        if self._shares is not None:
            self._shares.parsing.num_unparsed -= len(self._unparsed)
        self._unparsed.clear()
        if self._shares is not None and self._address:
            self._shares.connections.give_back(self._address)
            self._address = ""
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unfinished.clear()
        super().connection_lost(exc)
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Parse received data, immediately or when the address may use more time of the event loop."""
        if self._refused or self.transport.is_closing():
            return
        if self._shares is None:
            self._parse(data)
        elif self._unparsed or self._shares.parsing.wait_s(self._address) > 0:
            self._parse_later(data)
        else:
            self._parse_and_charge(data)

    def _parse_and_charge(self, data: bytes) -> None:
        assert self._shares is not None
        began, before = time.perf_counter(), self._num_messages
        self._parse(data)
        seconds = time.perf_counter() - began + _REQUEST_S * (self._num_messages - before)
        self._shares.parsing.charge(self._address, seconds)

    def _parse_later(self, data: bytes) -> None:
        assert self._shares is not None
        parsing = self._shares.parsing
        if parsing.num_unparsed + len(data) > _MAX_UNPARSED_BYTES:
            self.transport.abort()
            return
        if not self._unparsed:
            self.loop.call_later(parsing.wait_s(self._address), self._parse_now)
        self._unparsed += data
        parsing.num_unparsed += len(data)
        self.flow.pause_reading()

    def _parse_now(self) -> None:
        if not self._unparsed or self._shares is None:
            return  # The connection has ended.
        parsing = self._shares.parsing
        if (wait_s := parsing.wait_s(self._address)) > 0:
            self.loop.call_later(wait_s, self._parse_now)
            return
        data = bytes(self._unparsed)
        self._unparsed.clear()
        parsing.num_unparsed -= len(data)
        self.flow.resume_reading()
        self._parse_and_charge(data)

    def _parse(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        before = self._num_messages
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(400, "request: not valid HTTP/1.1; check the method, the headers and the chunks")
        self._take_pieces()
        if self._refused or self.transport.is_closing():
            return
        if self._in_head:
            self._pending_head_bytes += len(data)
            if self._pending_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
        elif self._in_message:
            self._received_bytes += len(data) if self._num_messages == before else 0
            if self._received_bytes > MAX_HEAD_BYTES + 2 * self._body_bytes:
                self._refuse(400, "body: its chunks and trailers are larger than its content; send larger chunks")
        elif self.cycle is not None and self.cycle.response_complete and self._timer is None:
            # Restart uvicorn's timer, which an empty line between requests has stopped.
            self._timer = self.loop.call_later(KEEP_ALIVE_S, self.transport.close)

    def _feed(self, data: bytes) -> None:
        """Parse data; the parser stops after each request that offers another protocol (`Upgrade`)."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = data[stopped.args[0] :]  # Ignore the offered upgrade, as RFC 9110 permits.
            else:
                return

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or a trailer."""
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        super().on_header(name, value.rstrip(b" \t"))

    def on_message_begin(self) -> None:
        """Start a request."""
        if len(self.pipeline) == _MAX_PIPELINED:
            self._refused = True
            self.transport.abort()
            raise _StopParsingError
        super().on_message_begin()
        scope = cast(dict[str, object], self.scope)
        scope[ABORT_KEY], scope[NAMES_KEY] = self.transport.abort, self._names
        self._num_messages += 1
        self._num_headers = self._head_bytes = self._pending_head_bytes = self._body_bytes = self._received_bytes = 0
        self._in_head = self._in_message = True
        self._stop_timer()
        self._timer = self.loop.call_later(
            HEAD_TIMEOUT_S,
            self._refuse,
            408,
            f"request head: not complete after {HEAD_TIMEOUT_S:g} s; send it without pauses",
        )

    def on_headers_complete(self) -> None:
        """Start the body and the response."""
        version = self.parser.get_http_version()
        try:
            self.url = check_head(version, self.url, self.headers)
        except HeadError as error:
            self._refuse(error.status, str(error))
            raise _StopParsingError from None
        self._in_head = False
        self._stop_timer()
        self.expect_100_continue &= version != "1.0"
        super().on_headers_complete()
        if self.cycle is not None and self.cycle not in self._unfinished:
            self._unfinished.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body; uvicorn gets all parts of one read together."""
        if len(self._pieces) == _MAX_PIECES:
            self._refuse(400, "body: its chunks are too small; send larger chunks")
            raise _StopParsingError
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """End a request; its response may not be complete."""
        self._take_pieces()
        self._in_message = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End a response, even if the request's body is not complete."""
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        super().on_response_complete()
        if self._refusal and not self._unfinished:
            self._send_refusal()
            return
        in_body = self._in_message and not self._in_head
        if in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._stop_timer()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _take_pieces(self) -> None:
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            self._body_bytes += len(body)
            if not self._refused:
                super().on_body(body)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > _MAX_HEADERS:
            self._refuse_head()
            raise _StopParsingError

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_head(self) -> None:
        what = f"send at most {MAX_HEAD_BYTES} bytes of headers, and at most {_MAX_HEADERS} headers"
        self._refuse(431, f"request head: too large; {what}")

    def _refuse(self, status: int, text: str) -> None:
        """Stop parsing. Send an error after the responses to earlier requests, and close the connection.

        If the response to the refused request itself has begun, abort the connection.
        """
        self._refused = True
        self._stop_timer()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self._refusal = f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()
        if self._in_message and not self._in_head:
            if self.cycle.response_complete:
                self.transport.close()
                return
            if self.cycle.response_started:
                self.transport.abort()
                return
            # Drop the handler's response.
            self._unfinished.remove(self.cycle)
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._unfinished:
            self._send_refusal()

    def _send_refusal(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, _until_close(cycle, app) if cycle.scope["http_version"] == "1.0" else app)


def _until_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return the application for HTTP/1.0, which has no chunks: a body without a length ends with the connection.

    uvicorn sends chunks to all clients, even those with HTTP/1.0. It sends other bodies if it knows their remaining
    length.
    """

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = True

        async def send_unchunked(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return run


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket whose port other front-end processes may share.

    Raises:
        OSError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
