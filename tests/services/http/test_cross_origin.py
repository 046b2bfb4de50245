"""Web pages and HTTP: what a browser sends for a page of another origin is refused, unless the origin is allowed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from measure.testbed.service import free_ports
from services.http.cross_origin import CrossOriginPolicy, cross_origin_policy
from shared.config import ConfigError, FrontendConfig
from shared.errors import PermissionDeniedError
from tests.services.stack import Stack, running_stack

EVIL, APP = "http://evil.example", "https://app.example.org"
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4}
TEXT = json.dumps(PROMPT)
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def policy(host: str = "127.0.0.1", hosts: str = "", origins: str = "") -> CrossOriginPolicy:
    """The policy of a listener with these settings."""
    return cross_origin_policy(FrontendConfig(host=host, allowed_hosts=hosts, allowed_origins=origins))


def accepts(policy: CrossOriginPolicy, **headers: str) -> bool:
    """Whether a request with these headers is accepted."""
    try:
        policy.check(Headers({name.replace("_", "-"): value for name, value in headers.items()}))
    except PermissionDeniedError:
        return False
    return True


async def post(stack: Stack, *, text: str = TEXT, **headers: str) -> httpx.Response:
    """Send a completion with only these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await stack.http.post("/v1/completions", content=text, headers=named)


def error_of(response: httpx.Response) -> tuple[int, str]:
    """The status and message of an error in OpenAI's form."""
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "header"),
    [
        ({"content_type": "text/plain", "origin": EVIL, "host": "evil.example:8000"}, "Host"),
        ({"content_type": "text/plain", "origin": EVIL}, "Origin"),
        ({"content_type": "application/json", "origin": EVIL}, "Origin"),
        ({"content_type": "application/x-www-form-urlencoded", "origin": "null"}, "Origin"),
        ({"content_type": "application/json", "origin": EVIL, "sec_fetch_site": "cross-site"}, "Origin"),
        ({"content_type": "application/json", "host": "evil.example:8000"}, "Host"),
    ],
    ids=["simple POST after rebinding", "simple POST", "POST", "form of a sandbox", "fetch metadata", "rebinding"],
)
def test_a_foreign_page_generates_nothing(tmp_path: Path, headers: dict[str, str], header: str) -> None:
    """On a loopback listener its request ends with 403, and no token is computed for it."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            refused = await post(stack, **headers)

            status, message = error_of(refused)
            assert status == 403
            assert message.startswith(f"{header}: ")
            assert "access-control-allow-origin" not in refused.headers
            assert stack.core.submissions == []
            assert (await post(stack, content_type="application/json")).status_code == 200

    asyncio.run(main())


def test_a_foreign_page_gets_no_permission(tmp_path: Path) -> None:
    """Without allowed origins, a preflight is refused and carries no permission."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            answer = await stack.http.options("/v1/completions", headers={"origin": EVIL, **PREFLIGHT})

            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control-")]

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/v1/models", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs", "/x"]
)
def test_a_rebound_name_reads_no_path(tmp_path: Path, path: str) -> None:
    """With a foreign name, every path of a loopback listener is refused; with its own name it responds."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            refused = await stack.http.get(path, headers={"host": "evil.example"})
            served = await stack.http.get(path)

            assert error_of(refused) == (
                403,
                "Host: 'evil.example' is not an allowed name; use localhost or an IP address, or add the name to"
                " --allowed-hosts",
            )
            assert served.status_code == (404 if path == "/x" else 200)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("content_type", "complaint"),
    [
        ("", "missing"),
        ("text/plain", "'text/plain' is not supported"),
        ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded' is not supported"),
        ("text/plain; application/json", "'text/plain; application/json' is not supported"),
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
def test_a_body_needs_a_json_content_type(tmp_path: Path, path: str, content_type: str, complaint: str) -> None:
    """A body without the content type of JSON is refused with the remedy.

    Browsers send other types without a preflight, some of them without an Origin.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            headers = {"content-type": content_type} if content_type else {}
            refused = await stack.http.post(path, content=TEXT, headers=headers)

            assert error_of(refused) == (415, f"Content-Type: {complaint}; send 'Content-Type: application/json'")
            assert stack.core.submissions == []

    asyncio.run(main())


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_parameters_and_capitals_of_the_content_type_do_not_matter(tmp_path: Path, content_type: str) -> None:
    """RFC 9110 allows both."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            assert (await post(stack, content_type=content_type)).status_code == 200

    asyncio.run(main())


def test_a_page_of_an_allowed_origin_is_served(tmp_path: Path) -> None:
    """Its preflight is granted, and it may read responses, streams and errors; other origins are refused."""

    async def main() -> None:
        async with running_stack(tmp_path, allowed_origins=f"{APP}, http://localhost:3000") as stack:
            granted = await stack.http.options("/v1/completions", headers={"origin": APP, **PREFLIGHT})
            assert granted.status_code == 200
            assert granted.headers["access-control-allow-origin"] == APP
            assert "POST" in granted.headers["access-control-allow-methods"]
            assert granted.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
            assert "access-control-allow-credentials" not in granted.headers

            whole = await post(stack, origin=APP, content_type="application/json")
            stream = await post(
                stack, text=json.dumps({**PROMPT, "stream": True}), origin=APP, content_type="application/json"
            )
            wrong = await post(stack, text="{}", origin=APP, content_type="application/json")
            for answer, status in ((whole, 200), (stream, 200), (wrong, 400)):
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == APP
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert stream.text.endswith("data: [DONE]\n\n")

            other = await post(stack, origin=EVIL, content_type="application/json")
            plain = await post(stack, origin=APP, content_type="text/plain")
            assert other.status_code == 403
            assert plain.status_code == 415

    asyncio.run(main())


def test_any_origin_may_be_allowed(tmp_path: Path) -> None:
    """`*` lets every page call, files of the user's own included."""

    async def main() -> None:
        async with running_stack(tmp_path, allowed_origins="*") as stack:
            for origin in (EVIL, "null"):
                answer = await post(stack, origin=origin, content_type="application/json")
                assert answer.status_code == 200
                assert answer.headers["access-control-allow-origin"] == "*"

    asyncio.run(main())


def test_the_services_own_pages_may_call(tmp_path: Path) -> None:
    """A page from the same address is accepted; behind a proxy that changes Host, the browser's header shows it."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            own = str(stack.http.base_url).rstrip("/")
            proxied = {"origin": "https://chat.example.org", "sec_fetch_site": "same-origin"}
            for headers in ({"origin": own}, proxied):
                assert (await post(stack, content_type="application/json", **headers)).status_code == 200

    asyncio.run(main())


def test_the_port_for_probes_checks_as_well(tmp_path: Path) -> None:
    """Metrics cannot be read under a foreign name there, either."""

    async def main() -> None:
        (port,) = free_ports(1)
        async with running_stack(tmp_path, health_port=port) as stack:
            url = f"http://127.0.0.1:{port}/metrics"
            assert (await stack.http.get(url)).status_code == 200
            assert (await stack.http.get(url, headers={"host": "evil.example"})).status_code == 403

    asyncio.run(main())


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LOCALHOST", "localhost.", "app.localhost:8000", "[::1]:8000",
        "[::1]", "10.42.0.17:8000", "192.168.1.5",
    ],
)  # fmt: skip
def test_names_that_cannot_be_rebound_are_accepted(host: str) -> None:
    """Whatever is configured: probes and scrapes use addresses, port forwarding uses localhost."""
    for each in (policy(), policy("0.0.0.0"), policy(hosts="api.example.org"), policy("0.0.0.0", "api.example.org")):
        assert accepts(each, host=host)


@pytest.mark.parametrize("listener", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_listener_has_no_other_names(listener: str) -> None:
    """Names that merely contain or resemble its own are foreign."""
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8000",
        "evillocalhost",
        "1.2.3",
        "[x]",
    ):
        assert not accepts(policy(listener), host=host)


@pytest.mark.parametrize("listener", ["0.0.0.0", "::", "10.0.0.5", "quire.example.org"])
def test_an_open_listener_has_every_name(listener: str) -> None:
    """Service names, proxies and load balancers need no list; if a list is given, only its names are accepted."""
    for host in ("quire.default.svc.cluster.local:8000", "api.example.org", "frontend:8000"):
        assert accepts(policy(listener), host=host)
    listed = policy(listener, hosts="api.example.org, *.svc.cluster.local")
    assert accepts(listed, host="quire.default.svc.cluster.local:8000")
    assert accepts(listed, host="API.example.org")
    assert not accepts(listed, host="frontend:8000")
    assert not accepts(listed, host="svc.cluster.local")


def test_a_loopback_listener_behind_a_proxy_takes_the_names_on_the_list() -> None:
    """A proxy on the same machine forwards the public name; `*` stands for every name."""
    assert accepts(policy(hosts="api.example.org"), host="api.example.org")
    assert not accepts(policy(hosts="api.example.org"), host="evil.example")
    assert accepts(policy(hosts="*"), host="evil.example")


def test_clients_that_are_no_browsers_are_accepted() -> None:
    """They send no Origin, and HTTP/1.0 no Host."""
    assert accepts(policy())
    assert accepts(policy(), host="127.0.0.1:8000", user_agent="curl/8.5")


def test_own_origins() -> None:
    """An origin is the service's own if it equals the request's Host, or if the browser says so."""
    each = policy("0.0.0.0")
    assert accepts(each, host="api.example.org", origin="https://api.example.org")
    assert accepts(each, host="10.0.0.5:8000", origin="http://10.0.0.5:8000")
    assert accepts(each, host="backend:8000", origin="https://api.example.org", sec_fetch_site="same-origin")
    for fetch_site in ("cross-site", "same-site", "none", ""):
        assert not accepts(each, host="api.example.org", origin="https://app.example.org", sec_fetch_site=fetch_site)
    for origin in ("null", "", "http://[", "http://10.0.0.5:3000", "http://10.0.0.5"):
        assert not accepts(each, host="10.0.0.5:8000", origin=origin)
    assert not accepts(each, origin="null")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"origins": "app.example.org"}, "allowed_origins (--allowed-origins): 'app.example.org' is not an origin"),
        ({"origins": "https://app.example.org/"}, "'https://app.example.org/' is not an origin"),
        ({"origins": f"{APP},https://*.example.org"}, "'https://*.example.org' is not an origin"),
        ({"origins": "https://app.example.org:x"}, "'https://app.example.org:x' is not an origin"),
        ({"origins": "null"}, "'null' is not an origin; write SCHEME://HOST"),
        ({"hosts": "https://api.example.org"}, "allowed_hosts (--allowed-hosts): 'https://api.example.org' is not"),
        ({"hosts": "api.example.org:8000"}, "'api.example.org:8000' is not a host name"),
        ({"hosts": "*example.org"}, "'*example.org' is not a host name; write NAME or *.NAME"),
    ],
)  # fmt: skip
def test_entries_that_would_never_match_are_refused(settings: dict[str, Any], complaint: str) -> None:
    """A misspelt entry is an error at the start, not a page that does not work."""
    with pytest.raises(ConfigError) as error:
        policy(**settings)

    assert complaint in str(error.value)
