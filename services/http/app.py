"""The ASGI applications and their routes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from services.access.principals import Principals
from services.access.shares import Shares
from services.calls.context import Services
from services.calls.embeddings import Embedder
from services.calls.generation import Generator
from services.calls.load_reports import LoadReports
from services.calls.scoring import Scorer
from services.calls.texts import Texts
from services.http.console.endpoints import ConsoleEndpoints
from services.http.console.page import page_routes
from services.http.cross_origin import CrossOriginPolicy, middleware_of
from services.http.embeddings import EmbeddingEndpoint
from services.http.endpoint import Endpoints, Handler
from services.http.errors import MESSAGES, RESPONSES, Dialect, make_answer, make_messages_error
from services.http.generation import GenerationEndpoints
from services.http.load_header import LoadHeader
from services.http.messages.endpoint import MessagesEndpoints
from services.http.openapi import PAGE, describe
from services.http.probes import Families, probe_routes
from services.http.responses.endpoint import ResponsesEndpoints
from services.http.runner import Runner
from services.http.scoring.endpoint import ScoringEndpoints
from services.http.texts import TextEndpoints
from shared.ids import draw_request_id

_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
"""Methods of all paths together."""
_CLIENT_PATHS = frozenset(
    ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
)
"""Paths that clients append to a base URL."""


@dataclass(frozen=True, slots=True)
class HttpApi:
    """The application, and the function that drains it."""

    app: Starlette
    drain: Callable[[float], Awaitable[None]]
    """See `Endpoints.drain`."""


def make_api(
    services: Services,
    generator: Generator,
    embedder: Embedder,
    scorer: Scorer,
    texts: Texts,
    shares: Shares,
    principals: Principals,
    policy: CrossOriginPolicy,
    reports: LoadReports,
    *,
    is_ready: Callable[[], bool],
    snapshot: Callable[[float], Awaitable[Families | None]],
    own_families: Callable[[], Families],
) -> HttpApi:
    """Return the application of one front-end process."""
    endpoints = Endpoints(shares, services.metrics.http_ended, principals)
    runner = Runner(services, generator)
    generation = GenerationEndpoints(services, runner)
    responses, messages = ResponsesEndpoints(services, runner, texts), MessagesEndpoints(services, runner, texts)
    embedding = EmbeddingEndpoint(services, embedder)
    scoring = ScoringEndpoints(services, scorer)
    text = TextEndpoints(services, texts)
    served: list[tuple[str, str, Handler]] = [
        ("GET", "/v1/models", text.list_models),
        ("GET", "/v1/models/{name:path}", text.get_model),
        ("POST", "/v1/completions", generation.complete),
        ("POST", "/v1/chat/completions", generation.chat),
        ("POST", "/v1/embeddings", embedding.embed),
        ("POST", "/pooling", embedding.pool),
        *(("POST", path, scoring.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(("POST", path, scoring.score) for path in ("/score", "/v1/score")),
        ("POST", "/tokenize", text.tokenize),
        ("POST", "/detokenize", text.detokenize),
    ]
    others: list[tuple[str, str, Handler, Dialect]] = [
        ("POST", "/v1/responses", responses.create, RESPONSES),
        ("POST", "/v1/responses/input_tokens", responses.count_tokens, RESPONSES),
        ("GET", "/v1/responses/{id}", responses.get, RESPONSES),
        ("DELETE", "/v1/responses/{id}", responses.delete, RESPONSES),
        ("GET", "/v1/responses/{id}/input_items", responses.input_items, RESPONSES),
        ("POST", "/v1/responses/{id}/cancel", responses.cancel, RESPONSES),
        ("POST", "/v1/messages", messages.create, MESSAGES),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens, MESSAGES),
    ]
    if services.config.console:
        served += ConsoleEndpoints(services.link, trace_url=services.config.console_trace_url).served()
    routes = [Route(path, endpoints.endpoint(path, handler), methods=[method]) for method, path, handler in served]
    routes += [
        Route(path, endpoints.endpoint(path, handler, dialect), methods=[method])
        for method, path, handler, dialect in others
    ]
    routes += probe_routes(is_ready=is_ready, snapshot=snapshot, own_families=own_families)
    routes += [Route("/openapi.json", _openapi), Route("/docs", _docs)]
    if services.config.console:
        routes += page_routes()
    middleware = [*middleware_of(policy), Middleware(LoadHeader, reports=reports)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse}, middleware=middleware)
    return HttpApi(app, endpoints.drain)


def make_probes(
    policy: CrossOriginPolicy,
    *,
    is_ready: Callable[[], bool],
    snapshot: Callable[[float], Awaitable[Families | None]],
    own_families: Callable[[], Families],
) -> Starlette:
    """Return the application of the separate port for probes and metrics."""
    routes = probe_routes(is_ready=is_ready, snapshot=snapshot, own_families=own_families)
    return Starlette(routes=routes, middleware=middleware_of(policy))


async def _openapi(_request: Request) -> Response:
    return JSONResponse(describe())


async def _docs(_request: Request) -> Response:
    return HTMLResponse(PAGE)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and request.scope["path"] == "*":
        return Response(status_code=204, headers={"allow": _METHODS})  # about the server, not about a path
    if error.status_code == 404:
        path = request.url.path
        if f"/v1{path}" in _CLIENT_PATHS:
            message = f"{path}: not found; use /v1{path}, that is, a base URL that ends with /v1"
        else:
            message = f"{path}: not found; /docs lists all paths"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method}: not allowed for {request.url.path}; use {allowed}"
    else:
        message = error.detail
    # Anthropic's clients show only errors in Anthropic's format.
    of_messages = request.url.path.removeprefix("/v1").startswith("/messages")
    if not of_messages:
        return JSONResponse(
            make_answer(error.status_code, message), status_code=error.status_code, headers=error.headers
        )
    request_id = draw_request_id()
    body = make_messages_error(error.status_code, message, request_id)
    headers = {**(error.headers or {}), **dict.fromkeys(MESSAGES.id_headers, request_id)}
    return JSONResponse(body, status_code=error.status_code, headers=headers)
