"""The files of the console's page.

The files are read once at start. They contain no data from the service, so they need no authentication. The content
security policy allows the page to load only these files, and to connect only to its own server.
"""

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PREFIX = "/console/"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def page_routes() -> list[Route]:
    """Return the routes for the page and its files."""
    folder = resources.files(__package__) / "static"
    routes = []
    for file in folder.iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            path = "/" if file.name == "index.html" else PREFIX + file.name
            routes.append(_route(path, file.read_bytes(), _TYPES[suffix]))
    return routes


def _route(path: str, content: bytes, media_type: str) -> Route:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'

    async def serve(request: Request) -> Response:
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, serve, methods=["GET"])
