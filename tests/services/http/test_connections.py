"""HTTP connections that cost the server more than their clients: small chunks, trailers, pipelines, many requests."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from services import frontend
from services.access.shares import owner_of
from services.http import server
from tests.services.stack import PATIENCE_S, Stack, TestCore, running_stack

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(
    stack: Stack, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, "asyncio.StreamWriter"]]:
    """A connection from an address of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.http.base_url.port, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def sent(stack: Stack, *pieces: bytes) -> bytes:
    """Return what the server sends for these pieces until it closes the connection."""
    async with connected(stack) as (reader, writer), asyncio.timeout(PATIENCE_S):
        said = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while more := await reader.read(1 << 16):
                said += more
        return said


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        pytest.param([CHUNKED, *[b"1\r\n \r\n" * 1000] * 200], 400, id="small chunks"),
        pytest.param([CHUNKED, *[b"1;" + b"a=b;" * 1000 + b"\r\n \r\n"] * 200], 400, id="extensions of chunks"),
        pytest.param([CHUNKED + b"0\r\n", *[b"a: b\r\n" * 1000] * 200], 431, id="trailers"),
        pytest.param([CHUNKED + b"0\r\na: ", *[b"b" * 10_000] * 200], 400, id="an endless trailer"),
        pytest.param([b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 2000 + b"\r\n"], 431, id="many headers"),
        pytest.param([b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], 431, id="a long URL"),
        pytest.param([b"\x00\xff\r\n\r\n"], 400, id="no HTTP"),
        pytest.param([GET * 20_000], None, id="a long pipeline"),
    ],
)
def test_what_costs_more_to_parse_than_to_send_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], status: int | None
) -> None:
    """The connection is closed, with an error unless an answer is outstanding. Others are served as before."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 10 * PATIENCE_S)
    monkeypatch.setattr(server, "LINGER_S", 10 * PATIENCE_S)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            said = await sent(stack, *pieces)
            if status is not None and said:  # A client that continues to send may miss the response.
                assert f"HTTP/1.1 {status} ".encode() in said
            assert (await stack.http.get("/health")).status_code == 200

    asyncio.run(main())


def test_a_short_pipeline_is_answered_in_order(tmp_path: Path) -> None:
    """Requests that a client sends before reading the responses are served one by one."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            last = GET.replace(b"/health", b"/nowhere").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            said = await sent(stack, GET * 5 + last)
            assert [said.count(each) for each in (b"HTTP/1.1 200", b"HTTP/1.1 404")] == [5, 1]
            assert said.rindex(b"HTTP/1.1 200") < said.index(b"HTTP/1.1 404")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("last", "status"),
    [
        pytest.param(b"nonsense\r\n\r\n", 400, id="head"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505, id="version"),
        pytest.param(CHUNKED + b"x\r\n", 400, id="body"),
    ],
)
def test_requests_before_a_malformed_one_are_answered(tmp_path: Path, last: bytes, status: int) -> None:
    """The error is the last answer. A client would otherwise repeat requests that have run."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            said = await sent(stack, GET * 3 + last)
            assert [int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, status]

    asyncio.run(main())


def test_a_malformed_body_ends_an_answer_that_has_begun(tmp_path: Path) -> None:
    """A body whose request was answered early gets no second answer."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, connected(stack) as (reader, writer):
            unknown = CHUNKED.replace(b"/v1/completions", b"/unknown")
            writer.write(unknown)
            early = await reader.readuntil(b"}")
            writer.write(b"x\r\n")
            async with asyncio.timeout(PATIENCE_S):
                late = await reader.read()
            assert b"HTTP/1.1 404 " in early
            assert b"HTTP/1.1" not in late

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_without_chunks_gets_the_body_until_the_end(tmp_path: Path, stream: bool) -> None:
    """HTTP/1.0 has no transfer codings. A stream ends with the connection; other responses have a length."""
    body = json.dumps({"prompt": "hi", "max_tokens": 4, "stream": stream}).encode()
    head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            said = await sent(stack, head + body)
            head_of_answer, _, rest = said.partition(b"\r\n\r\n")
            assert head_of_answer.startswith(b"HTTP/1.1 200 ")
            assert b"transfer-encoding" not in head_of_answer
            assert b"connection: close" in head_of_answer
            assert (b"content-length" in head_of_answer) != stream
            assert rest.startswith(b"data: {" if stream else b"{")
            assert rest.endswith(b"data: [DONE]\n\n" if stream else b"}")

    asyncio.run(main())


def test_an_offer_of_another_protocol_is_ignored(tmp_path: Path) -> None:
    """`curl --http2` offers h2c, and continues on the same connection with HTTP/1.1."""
    offer = b"\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n"
    offering = GET.replace(b"\r\n\r\n", offer)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            said = await sent(stack, offering * 2 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert said.count(b"HTTP/1.1 200 ") == 3

    asyncio.run(main())


def test_a_target_without_a_path_is_refused(tmp_path: Path) -> None:
    """CONNECT has such a target. The client gets an error rather than a closed connection."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            said = await sent(stack, b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 400 ")
            assert b"request line: not a URL of this service" in said

    asyncio.run(main())


def test_spaces_around_a_header_do_not_count(tmp_path: Path) -> None:
    """RFC 9110 excludes them from the value."""
    spaced = GET.replace(b"Host: localhost", b"Host: \t localhost \t ").replace(
        b"\r\n\r\n", b"\r\nConnection: close \r\n\r\n"
    )

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            assert (await sent(stack, spaced)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(main())


def test_the_host_of_an_absolute_target_is_checked(tmp_path: Path) -> None:
    """On loopback, foreign names are refused, whatever the Host header says."""
    foreign = GET.replace(b"/health", b"http://attacker.example/health")

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            assert (await sent(stack, foreign + b"\0")).startswith(b"HTTP/1.1 403 ")
            assert (await sent(stack, GET.replace(b"/health", b"http://localhost/health") + b"\0")).startswith(
                b"HTTP/1.1 200 "
            )

    asyncio.run(main())


def test_a_client_that_leaves_ends_every_request_of_its_pipeline(tmp_path: Path) -> None:
    """The running request is cancelled, the next one does not start, and no task of the connection is left."""
    content = b'{"prompt": [5, 6, 7], "max_tokens": 4000}'
    request = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=20)) as stack:
            before = asyncio.all_tasks()
            async with connected(stack) as (_, writer):
                writer.write(request * 2)
                await stack.core.saw(lambda core: bool(core.submissions))
            await stack.core.saw(lambda core: bool(core.cancelled))
            if left := asyncio.all_tasks() - before:
                _, left = await asyncio.wait(left, timeout=PATIENCE_S)
            assert not left
            assert len(stack.core.submissions) == 1

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_body_in_small_chunks_is_served(tmp_path: Path, size: int) -> None:
    """Chunks may have any size unless there are thousands of them."""
    content = b'{"prompt": [5, 6, 7], "max_tokens": 2}' + b" " * 2000

    async def main() -> None:
        async with running_stack(tmp_path) as stack:

            async def pieces() -> AsyncIterator[bytes]:
                for start in range(0, len(content), size):
                    yield content[start : start + size]

            headers = {"content-type": "application/json"}
            response = await stack.http.post("/v1/completions", content=pieces(), headers=headers)
            assert response.status_code == 200, response.text

    asyncio.run(main())


def test_empty_lines_keep_no_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without requests ends, although its client sends empty lines."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)

    async def main() -> None:
        async with running_stack(tmp_path) as stack, connected(stack) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"ok\n")
            async with asyncio.timeout(PATIENCE_S):
                while not reader.at_eof():
                    writer.write(b"\r\n")
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        async with asyncio.timeout(0.05):
                            await reader.read(1)

    asyncio.run(main())


def test_an_address_with_many_requests_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next request waits until its time is paid off. One of another address, sent later, is answered before."""
    monkeypatch.setattr(server, "_REQUEST_S", 0.5)
    parse_later = server._Protocol._parse_later

    async def main() -> list[str]:
        order: list[str] = []
        has_arrived = asyncio.Event()

        def arrives(protocol: server._Protocol, data: bytes) -> None:
            parse_later(protocol, data)
            has_arrived.set()

        monkeypatch.setattr(server._Protocol, "_parse_later", arrives)
        async with (
            running_stack(tmp_path) as stack,
            connected(stack, "127.0.0.2") as (busy, to_busy),
            asyncio.TaskGroup() as group,
        ):

            async def answered(name: str, reader: asyncio.StreamReader) -> None:
                await reader.readuntil(b"ok\n")
                order.append(name)

            to_busy.write(GET)
            waits = group.create_task(answered("busy", busy))
            async with asyncio.timeout(PATIENCE_S):
                await has_arrived.wait()
            monkeypatch.setattr(server, "_REQUEST_S", 0.0)
            async with connected(stack, "127.0.0.3") as (reader, writer):
                writer.write(GET)
                await answered("other", reader)
            await waits
        return order

    assert asyncio.run(main()) == ["other", "busy"]


def test_grpc_connections_leave_descriptors_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond the limit are closed; HTTP is served as before, and so is gRPC when some have ended."""
    monkeypatch.setattr(frontend, "_max_connections", lambda: 12)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            host, port = stack.target.split(":")
            opened = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
            async with asyncio.timeout(PATIENCE_S):
                firsts = await asyncio.gather(*(reader.read(1) for reader, _ in opened), return_exceptions=True)
            assert 5 <= sum(isinstance(each, bytes) and len(each) == 1 for each in firsts) <= 6
            assert (await stack.http.get("/health")).status_code == 200
            for _, writer in opened:
                writer.close()
            async with aio.insecure_channel(stack.target) as channel, asyncio.timeout(PATIENCE_S):
                await channel.channel_ready()

    asyncio.run(main())


def test_addresses_of_one_network_share() -> None:
    """An IPv6 address counts as its /64 network; an IPv4 address counts as itself in any notation."""
    assert owner_of("2001:db8::1:2:3") == owner_of("2001:db8::9") != owner_of("2001:db8:0:1::9")
    assert owner_of("10.0.0.1") == owner_of("::ffff:10.0.0.1") != owner_of("10.0.0.2")
    assert owner_of("") == ""
