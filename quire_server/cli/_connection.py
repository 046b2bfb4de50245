"""Connection flags of the commands: address, TLS and bearer token."""

import argparse
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

import grpc

from quire import _calls
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.http_client import Server
from shared.config import ConfigError

TARGET_VARIABLE = "QUIRE_TARGET"
TOKEN_VARIABLE = "QUIRE_TOKEN"
CA_VARIABLE = "QUIRE_TLS_CA"
_GRPC_TARGET, _HTTP_TARGET = "127.0.0.1:50051", "127.0.0.1:8000"
_TIMEOUT_S = 10.0
"""Timeout of unary calls, seconds."""


class CallOptions(TypedDict):
    """Options of a unary call."""

    timeout: float
    metadata: tuple[tuple[str, str], ...]


def add_target(parser: OneLineParser) -> None:
    """Add the connection flags of a command that uses gRPC."""
    parser.add_argument(
        "--target",
        type=_grpc_target,
        default=os.environ.get(TARGET_VARIABLE) or _GRPC_TARGET,
        metavar="HOST:PORT",
        help=f"gRPC address of the service (default: the variable {TARGET_VARIABLE}, or {_GRPC_TARGET})",
    )
    _add_tls(parser)


def add_http_target(parser: OneLineParser) -> None:
    """Add the connection flags of a command that uses HTTP."""
    parser.add_argument(
        "--target",
        type=_http_target,
        default=os.environ.get(TARGET_VARIABLE) or _HTTP_TARGET,
        metavar="HOST:PORT",
        help=f"HTTP address of the service (default: the variable {TARGET_VARIABLE}, or {_HTTP_TARGET})",
    )
    _add_tls(parser)


def _add_tls(parser: OneLineParser) -> None:
    # Read the token from the environment, so that process lists do not show it.
    parser.add_argument(
        "--tls-ca",
        default=os.environ.get(CA_VARIABLE) or None,
        metavar="FILE",
        help=f"use TLS and trust this CA (PEM file; default: the variable {CA_VARIABLE}, or no TLS);"
        f" the bearer token is read from the variable {TOKEN_VARIABLE}",
    )


@contextmanager
def connected(options: Namespace) -> Iterator[grpc.Channel]:
    """Open a channel to the address in the flags; convert errors from calls to `QuireError`.

    Raises:
        ConfigError: the CA file cannot be read.
        QuireError: a call failed.
    """
    secure, target = credentials(options), options.target
    settings = _calls.channel_options(target)
    with (
        grpc.insecure_channel(target, settings)
        if secure is None
        else grpc.secure_channel(target, secure, settings) as channel
    ):
        try:
            yield channel
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None


def call_options() -> CallOptions:
    """Return the timeout and the metadata (with the bearer token) for a unary call."""
    return {"timeout": _TIMEOUT_S, "metadata": _calls.call_metadata(token())}


def credentials(options: Namespace) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials, or None without TLS.

    Raises:
        ConfigError: the CA file cannot be read.
    """
    if not options.tls_ca:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(options.tls_ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"tls_ca: {options.tls_ca} cannot be read ({error.strerror})") from None


def http_server(options: Namespace) -> Server:
    """Return the HTTP server that the flags name.

    Raises:
        ConfigError: the CA file cannot be read, or contains no certificate.
    """
    return http_server_at(options, options.target, tls=bool(options.tls_ca))


def http_server_at(options: Namespace, address: str, *, tls: bool) -> Server:
    """Return the server at `address`, with the CA from the flags or the system CAs.

    Raises:
        ConfigError: the CA file cannot be read, or contains no certificate.
    """
    headers = {"authorization": f"Bearer {token()}"} if token() else {}
    context = (_tls_context(options) or ssl.create_default_context()) if tls else None
    return Server(address, context, headers)


def _tls_context(options: Namespace) -> ssl.SSLContext | None:
    if not options.tls_ca:
        return None
    try:
        return ssl.create_default_context(cafile=options.tls_ca)
    except OSError as error:  # Errors of ssl are also OSErrors.
        raise ConfigError(f"tls_ca: {options.tls_ca} cannot be used ({error.strerror or error})") from None


def token() -> str:
    """Return the bearer token from the environment, or an empty string."""
    return os.environ.get(TOKEN_VARIABLE, "")


def _grpc_target(text: str) -> str:
    """Check and return the address; gRPC also accepts dns:///HOST:PORT or unix:PATH."""
    if text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is an HTTP address, but this command uses gRPC; use HOST:PORT of the gRPC port"
        )
    text = text.removeprefix("grpc://")
    if not text:
        raise argparse.ArgumentTypeError("the address is empty; use HOST:PORT of the gRPC port")
    # gRPC would silently reduce a port modulo 65,536.
    if ":" in text and not text.startswith(("unix", "xds:", "passthrough:")) and not _is_address(text.split("/")[-1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return text


def _http_target(text: str) -> str:
    """Check and return the address; a URL that ends after the port is also accepted."""
    if text.startswith("https://"):
        raise argparse.ArgumentTypeError(f"{text!r}: pass HOST:PORT, and for TLS the CA with --tls-ca")
    if text.startswith("grpc://"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a gRPC address, but this command uses HTTP; use HOST:PORT of the HTTP port"
        )
    text = text.removeprefix("http://").removesuffix("/")
    if not _is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    return text


def _is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT."""
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and bool(parts.port) and parts.netloc == text and "@" not in text
    except ValueError:  # The port is invalid, or a bracket is missing.
        return False
