"""Allowed hosts and origins: protection against requests from foreign web pages.

Any page that a user visits can make the browser send requests to services on the user's machine and in the private
network. Two headers that a page cannot set identify such requests:

  * **Host**. A page's owner can change the address of the page's host name (DNS rebinding). The browser then treats the
    service at the new address as the page's own server. Such requests are detected because their Host is not a name of
    the service. IP addresses (which probes and scrapers use) and localhost are always accepted, because only names can
    be rebound.
  * **Origin**. A page can send a request even if it cannot read the response. Browsers send the page's origin with all
    such requests except plain GETs, which have no side effects here. The service accepts the configured origins and,
    like Go's `http.CrossOriginProtection`, its own origin. Clients other than browsers send no Origin. Pages from a
    configured origin may also read the responses, through Starlette's CORS middleware. Starlette's host check is not
    used, because it rejects every address that is not on its list.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http.errors import answer_of, status_of
from shared.config import ConfigError, FrontendConfig
from shared.curve import is_routable
from shared.errors import PermissionDeniedError

ANY = "*"
_LOCAL = ("localhost", "*.localhost")
_READABLE_HEADERS = ("x-request-id", "retry-after")
"""Response headers that a page may read beyond the CORS defaults."""
_SHOWN = 100
"""Maximum number of characters shown from a header in an error."""


@dataclass(frozen=True, slots=True)
class CrossOriginPolicy:
    """Allowed hosts and origins.

    Args:
        hosts: the service's names in lower case, with `*.NAME` for all subdomains of NAME; None for every name.
        origins: origins of permitted pages, in the browsers' format; `*` for every origin.
    """

    hosts: tuple[str, ...] | None
    origins: frozenset[str]

    def check(self, headers: Headers) -> None:
        """Check the headers of a request.

        Raises:
            PermissionDeniedError: the host or the origin is not allowed.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._accepts_host(_name_of(host)):
            raise PermissionDeniedError(
                f"Host: {host[:_SHOWN]!r} is not an allowed name; use localhost or an IP address, or add the name"
                " to --allowed-hosts"
            )
        if origin is not None and not self._accepts_origin(origin, host, headers.get("sec-fetch-site", "")):
            raise PermissionDeniedError(f"Origin: {origin[:_SHOWN]!r} is not allowed; add it to --allowed-origins")

    def _accepts_host(self, name: str) -> bool:
        return self.hosts is None or _is_address(name) or any(_matches(name, each) for each in (*_LOCAL, *self.hosts))

    def _accepts_origin(self, origin: str, host: str, fetch_site: str) -> bool:
        if ANY in self.origins or origin in self.origins:
            return True
        # One successful check suffices, because a proxy may change Host, and browsers send Sec-Fetch-Site only to HTTPS
        # and loopback.
        return fetch_site == "same-origin" or (bool(host) and origin.partition("://")[2].lower() == host.lower())


def cross_origin_policy(config: FrontendConfig) -> CrossOriginPolicy:
    """Return the policy of the settings.

    Raises:
        ConfigError: an entry is not a host name, or not an origin.
    """
    hosts, origins = _entries(config.allowed_hosts), _entries(config.allowed_origins)
    for host in hosts:
        if host != ANY and not _is_host(host.removeprefix("*.")):
            raise ConfigError(
                f"allowed_hosts (--allowed-hosts): {host!r} is not a host name; write NAME or *.NAME, without port"
            )
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            raise ConfigError(
                f"allowed_origins (--allowed-origins): {origin!r} is not an origin; write SCHEME://HOST or"
                " SCHEME://HOST:PORT, without path"
            )
    is_any = ANY in hosts or (not hosts and is_routable(config.host))
    return CrossOriginPolicy(None if is_any else hosts, frozenset(origins))


def middleware_of(policy: CrossOriginPolicy) -> list[Middleware]:
    """Return the middleware that enforces the policy on all paths of an application."""
    middleware = [Middleware(_CrossOriginCheck, policy=policy)]
    if policy.origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(policy.origins),
            allow_methods=("GET", "POST"),
            allow_headers=(ANY,),
            expose_headers=_READABLE_HEADERS,
        )
        middleware.append(cors)
    return middleware


class _CrossOriginCheck:
    """Middleware that rejects requests before their body is read."""

    def __init__(self, app: ASGIApp, policy: CrossOriginPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._policy.check(Headers(scope=scope))
        except PermissionDeniedError as error:
            await JSONResponse(answer_of(error), status_code=status_of(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _entries(setting: str) -> tuple[str, ...]:
    return tuple(entry.strip().lower() for entry in setting.split(",") if entry.strip())


def _name_of(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _matches(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_host(text: str) -> bool:
    return bool(text) and all(part and part.replace("-", "").replace("_", "").isalnum() for part in text.split("."))


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  # raises for an invalid one
    except ValueError:
        return False
    is_complete = bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"
    return is_complete and not {"@", "*"} & set(text)
