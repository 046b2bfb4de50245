"""A small server with OpenAI's streaming API, whose behaviour a test decides request by request."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Answer: TypeAlias = "Callable[[dict[str, Any], Reply], Awaitable[None]]"


@dataclass(slots=True)
class Reply:
    """The answer to one request."""

    writer: asyncio.StreamWriter
    begun: bool = False

    async def token(self, text: str = " a", **choice: Any) -> None:
        """Send one chunk with one token."""
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": None, **choice}]})

    async def end(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Send the end of the stream."""
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        await self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        await self.event({"choices": [], "usage": usage})
        await self.raw(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")

    async def event(self, value: dict[str, Any]) -> None:
        """Send any event."""
        await self.raw(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def raw(self, body: bytes) -> None:
        """Send a part of the body."""
        if not self.begun:
            self.begun = True
            self.writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        self.writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        await self.writer.drain()

    def refuse(self, status: int, code: str) -> None:
        """Answer with an error."""
        body = json.dumps({"error": {"message": "refused", "code": code}}).encode()
        self.writer.write(f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    def hang_up(self) -> None:
        """Close the connection."""
        self.writer.close()


@dataclass(slots=True)
class Server:
    """A running server."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """The requests so far."""


async def answer_all(body: dict[str, Any], reply: Reply) -> None:
    """Answer with as many tokens as asked for."""
    for _ in range(body["max_tokens"]):
        await reply.token()
    await reply.end(len(body["prompt"]), body["max_tokens"])


@asynccontextmanager
async def openai_server(answer: Answer = answer_all) -> AsyncIterator[Server]:
    """Serve on a free port."""
    server = Server()
    serving: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(serve(reader, writer)))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            if head.startswith(b"GET"):
                models = json.dumps({"data": [{"id": "small"}]}).encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(models)}\r\n\r\n".encode() + models)
                continue
            (length,) = (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            body = json.loads(await reader.readexactly(length))
            server.bodies.append(body)
            await answer(body, Reply(writer))
        writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
