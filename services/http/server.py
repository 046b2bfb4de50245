"""uvicorn inside the front end's event loop, and the listening socket that front ends of one machine share."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.access.tls import ServerTls, http_names

KEEP_ALIVE_S = 75
"""Maximum idle time of a connection, seconds, also before its first request.

Clients keep pooled connections for some seconds up to a minute. A close while a request is on its way costs the client
an error, so the server must not be the first to close.
"""
HEAD_TIMEOUT_S = 60.0
"""Maximum time to receive the head of a request (request line and headers), seconds."""
MAX_HEAD_BYTES = 64 << 10
"""Approximate maximum size of a request head, bytes; the parser itself has no limit."""
_DATE_INTERVAL_S = 1.0
ABORT_KEY = "quire.abort"
"""Scope entry: a function that drops the connection with everything that the client has not read."""
NAMES_KEY = "quire.certificate_names"
"""Scope entry: names in the client's certificate, which TLS has verified."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handling; `services.frontend` decides how the process ends."""

    def __init__(self, app: Starlette, tls: ServerTls | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
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

    An application needs abort because closing a connection waits for the reader, possibly for ever.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection, after the TLS handshake."""
        super().connection_made(transport)
        self._names = http_names(transport.get_extra_info("peercert"))
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(KEEP_ALIVE_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received data."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"request head: too large; send at most {MAX_HEAD_BYTES} bytes of headers")

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        scope = cast(dict[str, object], self.scope)
        scope[ABORT_KEY], scope[NAMES_KEY] = self.transport.abort, self._names
        self._in_head, self._head_bytes = True, 0
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(
            HEAD_TIMEOUT_S,
            self._refuse,
            408,
            f"request head: not complete after {HEAD_TIMEOUT_S:g} s; send it without pauses",
        )

    def on_headers_complete(self) -> None:
        """Start the body, and the answer."""
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, text: str) -> None:
        """Send an error and close the connection; abort it if an earlier answer is not complete."""
        self._stop_head_timer()
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
