"""Rules for the head of a request."""

import pytest

from services.http.request_head import HeadError, check_head


@pytest.mark.parametrize(
    "host",
    [
        b"", b"localhost", b"LOCALHOST:8080", b"a_b.example.org", b"10.0.0.1:80", b"[::1]", b"[::1]:8000", b"a:",
        b"xn--bcher-kva.example", b"a%20b",
    ],
)  # fmt: skip
def test_a_valid_host_is_accepted(host: bytes) -> None:
    """RFC 9110, section 7.2: a name or an address, with an optional port; empty without an authority."""
    assert check_head("1.1", b"/x?y", [(b"host", host)]) == b"/x?y"


@pytest.mark.parametrize(
    "host",
    [
        b"a b", b"a, b", b"a,b", b"a/b", b"user@a", b"a:b", b"a:1:2", b"::1", b"[::1", b"[x]", b"a\x7f",
        b"b\xc3\xbccher", b"a%2", b"http://a", b"a?b", b"a#b", b'"a"',
    ],
)  # fmt: skip
def test_an_invalid_host_is_refused(host: bytes) -> None:
    """RFC 9112, section 3.2, requires the status 400."""
    with pytest.raises(HeadError, match=r"Host: not a host name .*; send one host") as refused:
        check_head("1.1", b"/", [(b"host", host)])

    assert refused.value.status == 400


@pytest.mark.parametrize("version", ["0.9", "2.0", "3.0"])
def test_other_versions_are_refused(version: str) -> None:
    """RFC 9110, section 15.6.6: 505 for another major version."""
    with pytest.raises(HeadError, match=r"use HTTP/1\.1") as refused:
        check_head(version, b"/", [(b"host", b"a")])

    assert refused.value.status == 505


@pytest.mark.parametrize(
    ("version", "codings", "status"),
    [
        ("1.1", [b"gzip"], 400),
        ("1.1", [b"chunked, gzip"], 400),
        ("1.1", [b""], 400),
        ("1.1", [b"gzip, chunked"], 501),
        ("1.1", [b"gzip", b"chunked"], 501),
        ("1.1", [b"identity, chunked"], 501),
        ("1.1", [b"chunked", b"chunked"], 501),
        ("1.0", [b"chunked"], 400),
    ],
)
def test_only_chunks_are_accepted(version: str, codings: list[bytes], status: int) -> None:
    """RFC 9112, section 6.1: 400 if the end of the body is not known, and 501 for an unknown coding."""
    headers = [(b"host", b"a"), *((b"transfer-encoding", coding) for coding in codings)]
    with pytest.raises(HeadError, match=r"Transfer-Encoding: .*; ") as refused:
        check_head(version, b"/", headers)

    assert refused.value.status == status


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://b:80/x?y=http://c", b"/x?y=http://c"),
        (b"HTTPS://b:80", b"/"),
        (b"http://b:80?y", b"/?y"),
    ],
)
def test_the_host_of_an_absolute_target_replaces_the_header(target: bytes, expected: bytes) -> None:
    """RFC 9112, section 3.2.2. Everything after this sees a single host."""
    headers = [(b"accept", b"*/*"), (b"host", b"a")]

    assert check_head("1.1", target, headers) == expected
    assert sorted(headers) == [(b"accept", b"*/*"), (b"host", b"b:80")]


@pytest.mark.parametrize("target", [b"ftp://a/", b"http://user@a/", b"http:///x", b"http://a b/", b"x://"])
def test_an_absolute_target_of_no_service_is_refused(target: bytes) -> None:
    """Another scheme, a user or an empty host is an error (RFC 9110, section 4.2)."""
    with pytest.raises(HeadError, match="request line: ") as refused:
        check_head("1.1", target, [(b"host", b"a")])

    assert refused.value.status == 400


@pytest.mark.parametrize("target", [b"/v1/models?next=http://a/", b"//a/b", b"*", b"/http://a"])
def test_other_targets_stay_as_they_are(target: bytes) -> None:
    """A target in origin-form has no host, whatever its query contains."""
    headers = [(b"host", b"a")]

    assert (check_head("1.0", target, headers), headers) == (target, [(b"host", b"a")])
