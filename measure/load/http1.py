"""A small HTTP/1.1 client for many concurrent streams: one request at a time per connection, connections are reused.

The body is passed on inside the event loop's callback. So the arrival time does not include the time until a task is
scheduled.

A server may close an idle connection without notice. If this happens before the first byte of a response, the request
is sent again on a new connection, as curl does.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Url:
    """Parts of the address of a server."""

    host: str
    port: int
    tls: bool
    path: str
    """Base path of the API, without a slash at its end."""

    @classmethod
    def parse(cls, text: str) -> "Url":
        """Parse "http://HOST:PORT" or "https://HOST/PATH".

        Raises:
            ValueError: the text is not such a URL.
        """
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(text)
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection; `httptools` calls the methods whose names begin with `on_`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._take: Callable[[int, bytes], None] = lambda status, body: None
        self._done: asyncio.Future[int] | None = None
        self.reusable = False
        self.has_answer = False
        """Whether any byte of the response to the newest request has arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods but not the class

    def data_received(self, data: bytes) -> None:
        self.has_answer = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP/1.1: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def on_body(self, body: bytes) -> None:
        self._take(self._parser.get_status_code(), body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue
            return
        self.reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())

    def send(self, request: bytes, take: Callable[[int, bytes], None]) -> "asyncio.Future[int]":
        """Send a request; return a future for the status, which completes after the last part of the body."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._take, self.reusable, self.has_answer = take, False, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpPool:
    """Connections to one server."""

    def __init__(self, url: Url, headers: Mapping[str, str], context: ssl.SSLContext | None = None) -> None:
        self._url, self._headers = url, headers
        self._context = (context or ssl.create_default_context()) if url.tls else None
        self._free: list[_Connection] = []

    async def call(self, method: str, path: str, body: bytes, take: Callable[[int, bytes], None]) -> int:
        """Send a request and pass on each part of the body with the status; return the status.

        Raises:
            OSError: no connection, or it broke.
        """
        lines = [f"{method} {self._url.path}{path} HTTP/1.1", f"host: {self._url.address}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        request = "\r\n".join([*lines, "", ""]).encode() + body
        while self._free and not self._free[-1].reusable:
            self._free.pop()
        is_used = bool(self._free)
        connection = self._free.pop() if is_used else await self._connect()
        try:
            try:
                status = await connection.send(request, take)
            except ConnectionError:
                if not is_used or connection.has_answer:
                    raise
                connection.close()
                connection = await self._connect()
                status = await connection.send(request, take)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.close()
        return status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._url.host, self._url.port, ssl=self._context)
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()
