"""How commands reach a service: its address, TLS, and who calls."""

import os
from pathlib import Path

import grpc

from quire.cli._parser import Namespace, OneLineParser
from shared.config import ConfigError

TOKEN_VARIABLE = "QUIRE_TOKEN"


def add_tls(parser: OneLineParser) -> None:
    """Adds the flag for TLS. A token is read from the environment, so that no list of processes shows it."""
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help=f"speak TLS with a server that this CA vouches for; a bearer token is read from {TOKEN_VARIABLE}",
    )


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


def token() -> str:
    """The bearer token; empty without one."""
    return os.environ.get(TOKEN_VARIABLE, "")
