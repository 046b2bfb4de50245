"""uvicorn inside the front end's event loop, and the listening socket that front ends of one machine share."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.access.shares import Share
from services.access.tls import ServerTls, http_names

KEEP_ALIVE_S = 75
"""Maximum idle time of a connection, seconds, also before its first request.

Clients keep pooled connections for some seconds up to a minute. A close while a request is on its way costs the client
an error, so the server must not be the first to close.
"""
HEAD_TIMEOUT_S = 60.0
"""Maximum time to receive the head of a request (request line and headers), seconds."""
LINGER_S = 5.0
"""Maximum time to receive the rest of a body after its request was answered, seconds.

A connection that is closed at once resets, so that the client may not see the answer.
"""
MAX_HEAD_BYTES = 64 << 10
"""Approximate maximum size of a request head, bytes; the parser itself has no limit."""
_DATE_INTERVAL_S = 1.0
ABORT_KEY = "quire.abort"
"""Scope entry: a function that drops the connection with everything that the client has not read."""
NAMES_KEY = "quire.certificate_names"
"""Scope entry: names in the client's certificate, which TLS has verified."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handling; `services.frontend` decides how the process ends."""

    def __init__(self, app: Starlette, tls: ServerTls | None = None, connections: Share | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(_Protocol, connections=connections)),
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
        """Capture no signals."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for the request head, abort and certificate names.

    An application needs abort because closing a connection waits for the reader, possibly for ever. Connections beyond
    the share of their address are closed at once.
    """

    def __init__(self, *args: Any, connections: Share | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, after the TLS handshake."""
        super().connection_made(transport)
        if self._connections is not None:
            address = str((transport.get_extra_info("peername") or ("",))[0])
            if self._connections.take(address):
                self._address = address
            else:
                transport.abort()
        self._names = http_names(transport.get_extra_info("peercert"))
        self._in_head = self._in_message = self._refused = False
        self._head_bytes = 0
        """Bytes of the headers that the parser has found."""
        self._pending_head_bytes = 0
        """Bytes received for a head that is not complete."""
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(KEEP_ALIVE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_timer()
        if self._connections is not None and self._address:
            self._connections.give_back(self._address)
            self._address = ""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received data; nothing after a request whose head is too large."""
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._pending_head_bytes += len(data)
            if self._pending_head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._head_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        scope = cast(dict[str, object], self.scope)
        scope[ABORT_KEY], scope[NAMES_KEY] = self.transport.abort, self._names
        self._in_head, self._head_bytes, self._pending_head_bytes = True, 0, 0
        self._in_message = True
        self._stop_timer()
        self._timer = self.loop.call_later(
            HEAD_TIMEOUT_S,
            self._refuse,
            408,
            f"request head: not complete after {HEAD_TIMEOUT_S:g} s; send it without pauses",
        )

    def on_headers_complete(self) -> None:
        """Start the body, and the answer."""
        self._in_head = False
        self._stop_timer()
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; its answer may not be complete."""
        self._in_message = False
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """End an answer; the body of its request may not be complete."""
        super().on_response_complete()
        if self._in_message and not self.transport.is_closing():
            self._stop_timer()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_head(self) -> None:
        self._refused = True
        self._refuse(431, f"request head: too large; send at most {MAX_HEAD_BYTES} bytes of headers")

    def _refuse(self, status: int, text: str) -> None:
        """Send an error and close the connection; abort it if an earlier answer is not complete."""
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
        self.transport.close()


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
