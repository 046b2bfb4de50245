"""How commands reach a service: its address, TLS, and who calls."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import grpc

from quire import _calls
from quire.cli._parser import Namespace, OneLineParser
from shared.config import ConfigError

TARGET_VARIABLE = "QUIRE_TARGET"
TOKEN_VARIABLE = "QUIRE_TOKEN"
_GRPC_TARGET, _HTTP_TARGET = "127.0.0.1:50051", "127.0.0.1:8000"
_TIMEOUT_S = 10.0


class CallOptions(TypedDict):
    """What goes with a call that is answered at once."""

    timeout: float
    metadata: tuple[tuple[str, str], ...]


def add_target(parser: OneLineParser) -> None:
    """Adds the flags of a command that speaks gRPC: where the service is, and TLS."""
    parser.add_argument(
        "--target",
        default=os.environ.get(TARGET_VARIABLE, _GRPC_TARGET),
        metavar="HOST:PORT",
        help=f"the service's gRPC address (default: the variable {TARGET_VARIABLE}, or {_GRPC_TARGET})",
    )
    _add_tls(parser)


def add_http_target(parser: OneLineParser) -> None:
    """The same for one that speaks HTTP."""
    parser.add_argument(
        "--target",
        default=_HTTP_TARGET,
        metavar="HOST:PORT",
        help=f"the service's HTTP address (default: {_HTTP_TARGET})",
    )
    _add_tls(parser)


def _add_tls(parser: OneLineParser) -> None:
    # A token is read from the environment, so that no list of processes shows it.
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help=f"speak TLS with a server that this CA vouches for; a bearer token is read from {TOKEN_VARIABLE}",
    )


@contextmanager
def connected(options: Namespace) -> Iterator[grpc.Channel]:
    """A channel to the service that the flags say; errors of its calls become Quire's.

    Raises:
        ConfigError: the CA's file cannot be read.
        QuireError: a call failed.
    """
    secure, target = credentials(options), options.target
    with grpc.insecure_channel(target) if secure is None else grpc.secure_channel(target, secure) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None


def call_options() -> CallOptions:
    """How long such a call may take, and who makes it."""
    return {"timeout": _TIMEOUT_S, "metadata": _calls.call_metadata(token())}


def credentials(options: Namespace) -> grpc.ChannelCredentials | None:
    """Credentials for TLS, or None.

    Raises:
        ConfigError: the CA's file cannot be read.
    """
    if not options.tls_ca:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(options.tls_ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"tls_ca: {options.tls_ca} cannot be read ({error.strerror})") from None


def tls_context(options: Namespace) -> ssl.SSLContext | None:
    """The same for HTTPS.

    Raises:
        ConfigError: the CA's file cannot be read, or holds no certificate.
    """
    if not options.tls_ca:
        return None
    try:
        return ssl.create_default_context(cafile=options.tls_ca)
    except OSError as error:  # ssl's own errors are some, too
        raise ConfigError(f"tls_ca: {options.tls_ca} cannot be used ({error.strerror or error})") from None


def http_headers() -> dict[str, str]:
    """What HTTP requests say of who sends them."""
    return {"authorization": f"Bearer {token()}"} if token() else {}


def token() -> str:
    """The bearer token; empty without one."""
    return os.environ.get(TOKEN_VARIABLE, "")
