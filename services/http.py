"""HTTP for probes and scrapes: `/health`, `/ready`, `/metrics`, on uvicorn inside the gRPC server's event loop.

`/metrics` shows the whole scheduler service, whichever of its front ends is asked: the core merges what all processes
report. When the core does not answer, the front end shows its own.
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from protos.quire.link.v1 import link_pb2
from shared.metrics import CONTENT_TYPE, render_families

SNAPSHOT_TIMEOUT_S = 1.0

Families = list[link_pb2.MetricFamily]


def make_app(
    *,
    is_ready: Callable[[], bool],
    snapshot: Callable[[float], Awaitable[Families | None]],
    own_families: Callable[[], Families],
) -> Starlette:
    """The application."""

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", status_code=503)

    async def metrics(_request: Request) -> Response:
        families = await snapshot(SNAPSHOT_TIMEOUT_S)
        body = render_families(own_families() if families is None else families)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    return Starlette(routes=[Route("/health", health), Route("/ready", ready), Route("/metrics", metrics)])


class HttpServer(uvicorn.Server):
    """uvicorn, leaving the process's signals alone: how the process ends is decided in one place."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


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
