"""TLS of both listeners: which files, and what gRPC makes of them."""

from dataclasses import dataclass
from pathlib import Path

import grpc

from shared.config import ConfigError, FrontendConfig


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files."""

    cert: str
    """Certificate chain of the server."""
    key: str
    client_ca: str
    """CA of client certificates, which are then required; empty: none are."""

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC port.

        Raises:
            ConfigError: a file cannot be read.
        """
        return grpc.ssl_server_credentials(
            [(_content("tls_key", self.key), _content("tls_cert", self.cert))],
            root_certificates=_content("tls_client_ca", self.client_ca) if self.client_ca else None,
            require_client_auth=bool(self.client_ca),
        )


def tls_files(config: FrontendConfig) -> TlsFiles | None:
    """The files, or None without TLS.

    Raises:
        ConfigError: only some of them are given.
    """
    if not config.tls_cert and not config.tls_key and not config.tls_client_ca:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("tls_cert and tls_key (--tls-cert, --tls-key) are given together")
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)


def _content(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror})") from None
