"""Reserves the ports that a service's front ends share.

Front ends bind with SO_REUSEPORT, so that several can listen on one port. With this option, front ends of a *second*
service could bind too and silently take half of the clients. Therefore the supervisor first binds without the option,
which fails if another process listens.

It then sets the option and keeps the socket, but never listens, so the kernel sends it no connections. No other process
can get the port while a front end restarts. Port 0 becomes a number that all front ends can use.
"""

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from quire_server.serve.layout import Ports
from shared.config import ConfigError


@dataclass(frozen=True, slots=True)
class _Wanted:
    setting: str
    port: int


def reserve_ports(holder: ExitStack, host: str, *, grpc_port: int, http_port: int) -> Ports:
    """Return the two ports, reserved until `holder` is closed.

    Raises:
        ConfigError: a port is in use, or the host is not an address of this machine.
    """
    grpc, http = (
        _reserve(holder, host, wanted) for wanted in (_Wanted("grpc_port", grpc_port), _Wanted("http_port", http_port))
    )
    return Ports(grpc, http)


def _reserve(holder: ExitStack, host: str, wanted: _Wanted) -> int:
    flag = "--" + wanted.setting.replace("_", "-")
    if not 0 <= wanted.port <= 65535:
        raise ConfigError(f"{wanted.setting}: {wanted.port} is not a port; use 0 to 65535 with {flag}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = holder.enter_context(socket.socket(family, kind, protocol))
        # Connections of an earlier service in TIME_WAIT do not count as "in use".
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        raise ConfigError(
            f"{wanted.setting}: cannot listen on {host}:{wanted.port} ({error.strerror}); "
            f"choose another port with {flag}, or 0 for any free port"
        ) from None
    port: int = held.getsockname()[1]
    return port
