"""Probes and metrics: `/health` (also as `/ping`), `/ready`, `/metrics`, `/version`.

On every front end, `/metrics` returns the metrics of the whole service, because the core merges the metrics of all
processes. If the core does not respond, only the front end's own metrics are returned. Clients that accept OpenMetrics
get this format with exemplars. Other clients get Prometheus's text format.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from protos.quire.link.v1 import link_pb2
from quire import __version__
from shared.metrics import render_families

SNAPSHOT_TIMEOUT_S = 1.0

Families = list[link_pb2.MetricFamily]


def probe_routes(
    *,
    is_ready: Callable[[], bool],
    snapshot: Callable[[float], Awaitable[Families | None]],
    own_families: Callable[[], Families],
) -> list[Route]:
    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_request: Request) -> Response:
        if is_ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", status_code=503)

    async def metrics(request: Request) -> Response:
        families = await snapshot(SNAPSHOT_TIMEOUT_S)
        accept = request.headers.get("accept", "")
        body, content_type = render_families(own_families() if families is None else families, accept)
        return Response(body, headers={"content-type": content_type, "vary": "Accept"})

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": __version__})

    return [
        Route("/health", health),
        Route("/ping", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/version", version),
    ]
