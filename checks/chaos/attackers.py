"""Client process. Its clients are either attackers, which exhaust a front end's shared resources at once, or honest.

    python -m checks.chaos.attackers HOST:PORT TOKEN KIND,KIND,... SECONDS

The process prints "ready" when its request bodies are built. At the end it prints the used cores and the number of
exchanges by kind and status, as JSON. Status 0 is a connection that the server closed. Connections come from 127.0.0.2
and up, as if from another machine, because the front end counts connections by address.
"""

import asyncio
import itertools
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

ADDRESS = ("127.0.0.2", 0)
TURN = [{"role": "user", "content": "What is 3 + 4?"}]
Attack = Callable[[], Awaitable[int]]


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


BATCH = _json(prompt="Once upon", max_tokens=32, ignore_eos=True, n=128)
LONG = _json(prompt="Once upon", max_tokens=1900, ignore_eos=True, logprobs=5, n=16)
GET = b"GET /v1/models HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n"
STREAMS = _json(prompt="Once upon", max_tokens=1900, ignore_eos=True, stream=True, n=16)


class Clients:
    """Clients that share one token."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._token = token
        self.outcomes: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._invalid = itertools.cycle(
            [
                _json(messages=TURN, stop=[1] * 33_000),
                _json(messages=TURN, **{f"a{number}": 0 for number in range(5000)}),
                _json(messages=TURN, metadata={f"{number:x}": 1 for number in range(500_000)}),
                _json(messages=TURN, logit_bias={str(number): 1 for number in range(400_000)}),
                _json(messages=TURN, chat_template_kwargs={"a": [[]] * 1_000_000}),
                b'{"' + b"x" * 7_900_000 + b'":1}',
            ]
        )
        self._large = itertools.cycle(
            [
                ("/v1/completions", _json(prompt=[1] * 1_000_000, truncate_prompt_tokens=64, max_tokens=1)),
                ("/v1/chat/completions", _json(messages=TURN, user=[{}] * 1_000_000, max_tokens=1)),
            ]
        )

    async def run(self, kinds: dict[str, tuple[int, Attack]]) -> None:
        """Run this many clients of each kind at the same time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, (count, attack) in kinds.items():
                for _ in range(count):
                    group.create_task(self._repeat(name, attack))

    async def _repeat(self, name: str, attack: Attack) -> None:
        while True:
            try:
                status = await attack()
            except (OSError, asyncio.IncompleteReadError, ValueError):
                status = 0
            self.outcomes[f"{name} {status}"] += 1
            await asyncio.sleep(0 if status else 0.5)

    @asynccontextmanager
    async def _connected(self, receive_buffer: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.bind(ADDRESS)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
        except BaseException:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
        try:
            yield reader, writer
        finally:
            writer.close()

    def _head(self, path: str, length: int, token: str | None = None) -> bytes:
        size = f"Connection: close\r\nContent-Length: {length}" if length else "Transfer-Encoding: chunked"
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {token or self._token}\r\n"
            f"Content-Type: application/json\r\n{size}\r\n\r\n"
        ).encode()

    async def _exchange(self, path: str, body: bytes) -> int:
        async with self._connected() as (reader, writer):
            writer.write(self._head(path, len(body)) + body)
            status = int((await reader.readuntil(b"\r\n")).split()[1])
            while await reader.read(1 << 16):
                pass
        return status

    async def honest(self) -> int:
        """Send an ordinary chat request."""
        return await self._exchange("/v1/chat/completions", _json(messages=TURN, max_tokens=8))

    async def invalid(self) -> int:
        """Send a body with thousands of errors."""
        return await self._exchange("/v1/chat/completions", next(self._invalid))

    async def large(self) -> int:
        """Send a valid body of several megabytes."""
        return await self._exchange(*next(self._large))

    async def slow(self) -> int:
        """Send an endless body slowly, byte by byte."""
        async with self._connected() as (reader, writer):
            writer.write(self._head("/v1/completions", 1000) + b"{")
            return await self._drip(reader, writer, b" ", 5.0)

    async def endless(self) -> int:
        """Send an endless body without credentials; continue after the refusal."""
        async with self._connected() as (reader, writer):
            writer.write(self._head("/v1/completions", 0, token="unknown") + b"1\r\n{\r\n")
            return await self._drip(reader, writer, b"1\r\n \r\n", 1.0)

    async def chunked(self) -> int:
        """Send a valid body of which each byte is a chunk."""
        body = _json(messages=TURN, max_tokens=1, user="x" * 8000)
        async with self._connected() as (reader, writer):
            writer.write(self._head("/v1/chat/completions", 0))
            writer.writelines(b"1\r\n%c\r\n" % byte for byte in body)
            writer.write(b"0\r\n\r\n")
            return int((await reader.readuntil(b"\r\n")).split()[1])

    async def pipeline(self) -> int:
        """Send requests on one connection as fast as the server takes them, and read nothing."""
        get = GET % (self._host.encode(), self._token.encode())
        async with self._connected(receive_buffer=4096) as (_, writer):
            writer.transport.pause_reading()
            async with asyncio.timeout(30):
                while True:
                    writer.write(get * 100)
                    await writer.drain()

    async def batch(self) -> int:
        """Send a call that makes 128 requests."""
        return await self._exchange("/v1/completions", BATCH)

    async def unread(self) -> int:
        """Ask for an answer of megabytes, and do not read it."""
        async with self._connected(receive_buffer=4096) as (_, writer):
            writer.transport.pause_reading()
            writer.write(self._head("/v1/completions", len(LONG)) + LONG)
            await asyncio.sleep(30)
        return 200

    async def idle(self) -> int:
        """Open a connection and send nothing."""
        async with self._connected() as (reader, _):
            return len(await reader.read(1))

    async def _drip(self, reader: asyncio.StreamReader, writer: Any, piece: bytes, every_s: float) -> int:
        received = b""
        while not reader.at_eof():
            try:
                async with asyncio.timeout(every_s):
                    received += await reader.read(1 << 12)
            except TimeoutError:
                writer.write(piece)
        return int(received.split()[1]) if received else 0

    async def store(self) -> int:
        """Store a response of the maximum size."""
        pairs = {f"{number}": "x" * 512 for number in range(16)}
        return await self._exchange("/v1/responses", _json(input="x", max_output_tokens=1, metadata=pairs))

    async def grammar(self) -> int:
        """Request a new grammar that is expensive to compile."""
        number = next(self._numbers)
        forms: list[dict[str, Any]] = [
            {"guided_regex": f"(a|b|c){{1,{900 + number}}}(d|e){{1,900}}x"},
            {"guided_choice": [f"{number}-{each}-{'y' * 20}" for each in range(1000)]},
            {"guided_grammar": "root ::= " + " | ".join(f'"{number}{each}" root' for each in range(2000))},
        ]
        return await self._exchange(
            "/v1/chat/completions", _json(messages=TURN, max_tokens=1, **forms[number % len(forms)])
        )

    async def reading(self) -> int:
        """Request long streams and read them."""
        return await self._exchange("/v1/completions", STREAMS)

    async def stalled(self) -> int:
        """Request the same streams without reading them."""
        async with self._connected(receive_buffer=4096) as (_, writer):
            writer.transport.pause_reading()
            writer.write(self._head("/v1/completions", len(STREAMS)) + STREAMS)
            await asyncio.sleep(30)
        return 200

    def kinds(self) -> Iterator[tuple[str, tuple[int, Attack]]]:
        """Yield every kind of client with their number."""
        yield "honest", (26, self.honest)
        yield "reading", (2, self.reading)
        yield "batch", (2, self.batch)
        yield "invalid", (4, self.invalid)
        yield "large", (4, self.large)
        yield "slow", (400, self.slow)
        yield "store", (2, self.store)
        yield "grammar", (16, self.grammar)
        yield "stalled", (2, self.stalled)
        yield "endless", (100, self.endless)
        yield "idle", (100, self.idle)
        yield "chunked", (4, self.chunked)
        yield "pipeline", (4, self.pipeline)
        yield "unread", (2, self.unread)
        yield "flood", (40, self.batch)


async def _main(address: str, token: str, names: list[str], seconds: float) -> None:
    clients = Clients(address, token)
    kinds = {name: kind for name, kind in clients.kinds() if name in names}
    print("ready", flush=True)
    before = time.process_time()
    try:
        async with asyncio.timeout(seconds):
            await clients.run(kinds)
    except TimeoutError:
        print(json.dumps([(time.process_time() - before) / seconds, clients.outcomes]))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), float(sys.argv[4])))
