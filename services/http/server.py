"""uvicorn inside the front end's event loop, and the socket that the front ends of one machine share."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.tls import TlsFiles

KEEP_ALIVE_S = 75
"""How long a connection may lie idle. Clients pool theirs for some seconds up to a minute; whoever closes first while a
request is on its way costs the client an error, so it must not be us."""
ABORT_KEY = "quire.abort"
"""Scope entry: drops the connection at once, with whatever its client has not read."""


class HttpServer(uvicorn.Server):
    """uvicorn, leaving the process's signals alone: how the process ends is decided in one place."""

    def __init__(self, app: Starlette, tls: TlsFiles | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ssl_certfile=tls.cert if tls else None,
                ssl_keyfile=tls.key if tls else None,
                ssl_ca_certs=(tls.client_ca or None) if tls else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
                http=_Protocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class _Protocol(HttpToolsProtocol):
    """Lets the application abort a connection: closing one waits for a reader that may never come."""

    def on_message_begin(self) -> None:
        """Begins a request."""
        super().on_message_begin()
        cast(dict[str, object], self.scope)[ABORT_KEY] = self.transport.abort


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket whose port the other front-end processes may share.

    Raises:
        OSError: the address cannot be had.
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
