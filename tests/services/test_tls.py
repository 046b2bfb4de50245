"""Certificates that are renewed while both listeners serve, with real handshakes."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import trustme
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from services.access.tls import ServerTls, TlsFiles
from services.grpc.health import HealthServicer
from services.http.server import NAMES_KEY, HttpServer, listening_socket
from shared.config import ConfigError


@dataclass(frozen=True, slots=True)
class Renewed:
    """Private keys before and after."""

    key_before: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Papers:
    """A CA, and what it has issued."""

    server_name: str = "localhost"
    ca: trustme.CA = field(default_factory=trustme.CA)

    def write(self, files: TlsFiles) -> Renewed:
        """Replaces a server's files, as something that renews certificates does."""
        before = Path(files.key).read_bytes() if os.path.exists(files.key) else b""
        certificate = self.ca.issue_cert("127.0.0.1", self.server_name)
        _replace(files.cert, b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        _replace(files.key, certificate.private_key_pem.bytes())
        if files.client_ca:
            _replace(files.client_ca, self.ca.cert_pem.bytes())
        return Renewed(before, certificate.private_key_pem.bytes())

    def client(self, folder: Path, name: str) -> ssl.SSLContext:
        """An HTTPS client with a certificate of this CA, which trusts this CA."""
        certificate = self.ca.issue_cert(name)
        context = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())
        with certificate.private_key_and_cert_chain_pem.tempfile(str(folder)) as path:
            context.load_cert_chain(path)
        return context

    def channel(self, name: str) -> grpc.ChannelCredentials:
        """The same of gRPC."""
        certificate = self.ca.issue_cert(name)
        chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
        return grpc.ssl_channel_credentials(self.ca.cert_pem.bytes(), certificate.private_key_pem.bytes(), chain)


def _replace(path: str, content: bytes) -> None:
    Path(path + ".new").write_bytes(content)
    os.replace(path + ".new", path)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Both of them."""

    files: TlsFiles
    grpc_port: int
    http_port: int
    folder: Path

    async def grpc_takes(self, credentials: grpc.ChannelCredentials) -> bool:
        """Whether a new connection comes about and is answered."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with aio.secure_channel(f"localhost:{self.grpc_port}", credentials, options) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            except aio.AioRpcError:
                return False
        return True

    async def http_names(self, context: ssl.SSLContext, host: str = "localhost") -> list[str] | None:
        """Return the names in the certificate of a new HTTP connection; None if it fails."""
        try:
            reader, writer = await asyncio.open_connection(host, self.http_port, ssl=context)
            return await ask(reader, writer)
        except (OSError, ssl.SSLError, asyncio.IncompleteReadError):
            return None


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[str]:
    """Return the names that HTTP reads from the certificate of a connection."""
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: "))
    names: list[str] = json.loads(await reader.readexactly(length))
    return names


@asynccontextmanager
async def listening(folder: Path, papers: Papers, *, client_ca: bool = True) -> AsyncIterator[Listeners]:
    """Both listeners with these papers."""
    files = TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "ca.pem") if client_ca else "")
    papers.write(files)
    tls = ServerTls(files, check_interval_s=0)
    server = aio.server()
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    grpc_port = server.add_secure_port("localhost:0", tls.grpc_credentials())

    async def names(request: Request) -> JSONResponse:
        return JSONResponse(request.scope[NAMES_KEY])

    http = HttpServer(Starlette(routes=[Route("/", names)]), tls)
    listener = listening_socket("127.0.0.1", 0)
    await server.start()
    serving = asyncio.create_task(http.serve([listener]))
    yield Listeners(files, grpc_port, int(listener.getsockname()[1]), folder)
    http.stop()
    await serving
    await server.stop(0)


def test_renewed_certificates_are_taken_up_by_new_connections(tmp_path: Path) -> None:
    """After certificates and CA are replaced, new connections use them; existing connections continue.

    This holds for both listeners.
    """

    async def main() -> None:
        old, new = Papers(), Papers()
        async with listening(tmp_path, old) as listeners:
            assert await listeners.grpc_takes(old.channel("a"))
            standing = await asyncio.open_connection(
                "localhost", listeners.http_port, ssl=old.client(tmp_path, "old.example.org")
            )
            assert await ask(*standing) == ["old.example.org"]
            new.write(listeners.files)
            assert await listeners.grpc_takes(new.channel("b"))
            assert await listeners.http_names(new.client(tmp_path, "new.example.org")) == ["new.example.org"]
            # Connect without a server name in the handshake too.
            assert await listeners.http_names(new.client(tmp_path, "new.example.org"), "127.0.0.1") is not None
            assert await ask(*standing) == ["old.example.org"]
            standing[1].close()
            assert not await listeners.grpc_takes(old.channel("c"))
            assert await listeners.http_names(old.client(tmp_path, "c")) is None
            # The client trusts the new CA, but its certificate is from the old CA.
            mixed = old.client(tmp_path, "d")
            mixed.load_verify_locations(cadata=new.ca.cert_pem.bytes().decode())
            assert await listeners.http_names(mixed) is None

    asyncio.run(main())


def test_files_that_do_not_fit_together_change_nothing(tmp_path: Path) -> None:
    """An incomplete renewal (a certificate without its key) changes nothing; a complete one takes effect."""

    async def main() -> None:
        old, new = Papers(), Papers()
        async with listening(tmp_path, old, client_ca=False) as listeners:
            renewed = new.write(listeners.files)
            _replace(listeners.files.key, renewed.key_before)
            assert await listeners.grpc_takes(old.channel("a"))
            assert await listeners.http_names(old.client(tmp_path, "a")) == []
            _replace(listeners.files.key, renewed.key)
            assert await listeners.grpc_takes(new.channel("b"))
            assert await listeners.http_names(new.client(tmp_path, "b")) == []

    asyncio.run(main())


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    """A certificate with the key of another one, and a file without a CA, are named."""
    files = TlsFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), "")
    Papers().write(files)
    cert = (tmp_path / "cert.pem").read_bytes()
    Papers().write(files)
    (tmp_path / "cert.pem").write_bytes(cert)
    with pytest.raises(ConfigError, match="do not match"):
        ServerTls(files)
    Papers().write(files)
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match="tls_client_ca"):
        ServerTls(TlsFiles(files.cert, files.key, str(tmp_path / "ca.pem")))
