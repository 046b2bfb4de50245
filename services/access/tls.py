"""TLS for both listeners: certificates that are reloaded after changes on disk, and names in client certificates.

The certificates are renewed externally (ACME, cert-manager, an operator). At most once a second, a handshake checks
whether the files have changed. If so, new connections use the new certificates, and open connections are not affected.
If the files do not match, for example during a renewal, the failure is logged, the previous certificates remain in use,
and a later handshake checks again.
"""

import os
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from shared.config import ConfigError, FrontendConfig
from shared.logging import get_logger


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: str
    """Certificate chain of the server."""
    key: str
    client_ca: str
    """CA for client certificates, which are then required; empty for no client certificates."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Content of the files."""

    stamp: tuple[tuple[int, int, int], ...]
    grpc: grpc.ServerCertificateConfiguration
    http: ssl.SSLContext


class ServerTls:
    """Current certificates; safe to use from any thread."""

    def __init__(self, files: TlsFiles, *, check_interval_s: float = 1.0) -> None:
        """Read the files.

        Args:
            files: the paths.
            check_interval_s: minimum time between two checks for changes, seconds.

        Raises:
            ConfigError: a file cannot be read, or the files do not match.
        """
        self._files = files
        self._check_interval_s = check_interval_s
        self._lock = threading.Lock()
        self._next_check = 0.0
        self._refused: tuple[tuple[int, int, int], ...] = ()
        """Stamp of the files that failed to load at the last check."""
        self._loaded = _load(files)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC port."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.grpc,
            lambda: self._current().grpc,
            require_client_authentication=bool(self._files.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """Return a context for HTTP; each handshake switches to the current certificates."""

        def exchange(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current().http

        context = _http_context(self._files)
        context.sni_callback = exchange
        return context

    def _current(self) -> _Loaded:
        with self._lock:
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + self._check_interval_s
                self._reload_if_changed()
            return self._loaded

    def _reload_if_changed(self) -> None:
        try:
            stamp = _stamp(self._files)
            if stamp in (self._loaded.stamp, self._refused):
                return
            self._refused = stamp
            self._loaded = _load(self._files)
        except ConfigError as error:
            get_logger().error("certificate reload failed; keeping the previous certificates", error=str(error))
            return
        get_logger().info("certificates reloaded", cert=self._files.cert)


def server_tls(config: FrontendConfig) -> ServerTls | None:
    """Return the certificates, or None without TLS.

    Raises:
        ConfigError: only some of the files are given, or they are invalid.
    """
    if not config.tls_cert and not config.tls_key and not config.tls_client_ca:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("tls_cert, tls_key (--tls-cert, --tls-key): TLS needs both; use both or none")
    return ServerTls(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))


def grpc_names(auth_context: Mapping[str, Any]) -> list[str]:
    """Return the names in the client certificate that gRPC has verified; empty without a certificate."""
    found = [*auth_context.get("x509_common_name", ()), *auth_context.get("x509_subject_alternative_name", ())]
    return [name.decode(errors="replace") for name in found]


def http_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return the names in a verified client certificate, as described by `ssl`; empty without one."""
    if not certificate:
        return []
    common = [value for pairs in certificate.get("subject", ()) for field, value in pairs if field == "commonName"]
    return common + [value for _, value in certificate.get("subjectAltName", ())]


def _load(files: TlsFiles) -> _Loaded:
    stamp = _stamp(files)
    key, cert = _content("tls_key", files.key), _content("tls_cert", files.cert)
    client_ca = _content("tls_client_ca", files.client_ca) if files.client_ca else None
    loaded = _Loaded(
        stamp,
        # Create a context for HTTP to check that key and certificate match, because gRPC would fail only in the
        # handshake.
        http=_http_context(files),
        grpc=grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca),
    )
    if _stamp(files) != stamp:
        raise ConfigError("tls_cert, tls_key: the files changed while they were read")
    return loaded


def _http_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert, tls_key: {files.cert} and {files.key} do not match ({error})") from None
    if files.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_client_ca: {files.client_ca} contains no CA certificate ({error})") from None
    return context


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """Return a value that changes when a file, or the target of a link, changes."""
    stamps = []
    for setting, path in (("tls_cert", files.cert), ("tls_key", files.key), ("tls_client_ca", files.client_ca)):
        if path:
            try:
                found = os.stat(path)
            except OSError as error:
                raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror})") from None
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
    return tuple(stamps)


def _content(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error.strerror})") from None
