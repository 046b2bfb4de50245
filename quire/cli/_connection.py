"""How commands reach a service: its address, TLS, and who calls."""

import os
import ssl
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
