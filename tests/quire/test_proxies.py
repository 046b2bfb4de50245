"""Proxies of the environment: none to this machine, and `no_proxy` elsewhere."""

import asyncio
from collections.abc import Iterator

import pytest

from quire import AsyncClient, Client, _calls
from quire.errors import UnavailableError
from quire.v1 import model_pb2, model_pb2_grpc
from quire_server.cli import _connection
from quire_server.cli._parser import Namespace
from tests.quire.scripted_server import ScriptedServer, scripted_server

NO_PROXY = ("grpc.enable_http_proxy", 0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A server on loopback, in an environment whose proxy does not answer."""
    for name in ("grpc_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with scripted_server() as running:
        yield running


def test_clients_reach_this_machine_without_a_proxy(server: ScriptedServer) -> None:
    """Both clients and the commands reach a server on loopback, though a variable names a proxy."""

    async def main() -> tuple[int, ...]:
        async with AsyncClient(server.target) as client:
            return (await client.generate("x").result()).token_ids

    with Client(server.target) as client:
        assert client.generate("x").result().token_ids
    assert asyncio.run(main())
    with _connection.connected(Namespace(target=server.target, tls_ca=None)) as channel:
        model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=60)


def test_other_addresses_use_the_proxy_unless_no_proxy_names_them(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other addresses use the environment's proxy, except those in `no_proxy`."""
    target = server.target.replace("127.0.0.1", "0.0.0.0")
    with Client(target) as client, pytest.raises(UnavailableError):
        client.generate("x").result()
    monkeypatch.setenv("no_proxy", "0.0.0.0")
    with Client(target) as client:
        assert client.generate("x").result().token_ids


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.0.1:1", True),
        ("localhost:1", True),
        ("a.localhost:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("dns://8.8.8.8/localhost:1", True),
        ("dns:localhost:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("unix:/tmp/socket", True),
        ("unix:///tmp/socket", True),
        ("unix-abstract:name", True),
        ("10.0.0.1:1", False),
        ("localhost.example.org:1", False),
        ("dns:///quire:1", False),
        ("dns:1", False),
        ("[broken", False),
    ],
)
def test_local_addresses_in_every_form_of_grpc(target: str, local: bool) -> None:
    """A channel to this machine is known by its address, however it is written."""
    assert (NO_PROXY in _calls.channel_options(target)) is local
