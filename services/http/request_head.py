"""RFC 9112 rules for request heads that the parser does not check: version, target, Host, transfer coding.

If a request breaks one of these rules, a gateway in front of this server may read it differently than this server does.
Such requests are therefore refused.
"""

import re

_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"(?:(?:[\w.~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*|\[[0-9A-Fa-f:.]+\])(?::\d*)?", re.ASCII)
"""An authority without user, as in Host. RFC 3986 allows a comma too, but then it is a list of several hosts."""
_SCHEMES = (b"http", b"https")

Headers = list[tuple[bytes, bytes]]


class HeadError(Exception):
    """The head is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_head(version: str, target: bytes, headers: Headers) -> bytes:
    """Check the head of a request and return the target in origin-form.

    The host of a target in absolute-form replaces the Host header (RFC 9112, section 3.2.2).

    Args:
        version: of HTTP, such as "1.1".
        target: as received, not empty.
        headers: with names in lower case.

    Raises:
        HeadError: the head breaks a rule.
    """
    if version not in _VERSIONS:
        raise HeadError(505, f"request line: HTTP/{version} is not supported on this connection; use HTTP/1.1")
    _check_coding(version, headers)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise HeadError(400, f"request head: {len(hosts)} Host headers; send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HeadError(400, "Host: not a host name or address with an optional port; send one host")
    if target.startswith((b"/", b"*")):
        return target
    host, target = _split_uri(target)
    headers[:] = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    return target


def _check_coding(version: str, headers: Headers) -> None:
    codings = [
        each.strip().lower() for name, value in headers if name == b"transfer-encoding" for each in value.split(b",")
    ]
    if not codings:
        return
    if version == "1.0":
        raise HeadError(400, "Transfer-Encoding: HTTP/1.0 has none; send Content-Length or use HTTP/1.1")
    if codings[-1] != b"chunked":
        raise HeadError(400, "Transfer-Encoding: the last coding is not chunked; send 'Transfer-Encoding: chunked'")
    if codings != [b"chunked"]:
        raise HeadError(501, "Transfer-Encoding: only chunked is supported; send the body without another coding")


def _split_uri(uri: bytes) -> tuple[bytes, bytes]:
    """Return the host of an absolute URI, with its port, and the target in origin-form."""
    scheme, _, rest = uri.partition(b"://")
    found = re.match(rb"[^/?#]*", rest)
    host = found[0] if found else b""
    if scheme.lower() not in _SCHEMES or not host or not _HOST.fullmatch(host):
        raise HeadError(400, "request line: not a URL of this service; send the path, or http://HOST:PORT/PATH")
    target = rest[len(host) :]
    return host, target if target.startswith(b"/") else b"/" + target
