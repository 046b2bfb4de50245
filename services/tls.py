"""TLS of both listeners: certificates that are taken up when they change on disk, and who a client's says it is.

Certificates are short-lived and renewed by something else (ACME, cert-manager, a person). Each handshake looks, at most
once a second, whether the files are others than before; if so, new connections get the new ones, and those that stand
are left alone. Files that do not fit together, as in the midst of a renewal, change nothing: those before stay in
force, the log says so, and the next handshake looks again.
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
    """PEM files."""

    cert: str
    """Certificate chain of the server."""
    key: str
    client_ca: str
    """CA of client certificates, which are then required; empty: none are."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the files held when they were read."""

    stamp: tuple[tuple[int, int, int], ...]
    grpc: grpc.ServerCertificateConfiguration
    http: ssl.SSLContext


class ServerTls:
    """The certificates in force; safe to be asked from any thread."""

    def __init__(self, files: TlsFiles, *, look_every_s: float = 1.0) -> None:
        """Reads the files.

        Args:
            files: which.
            look_every_s: least time between two looks whether they have changed.

        Raises:
            ConfigError: one of them cannot be read, or they do not fit together.
        """
        self._files = files
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._refused: tuple[tuple[int, int, int], ...] = ()
        """The files that were last found not to fit together."""
        self._loaded = _load(files)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC port."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.grpc,
            lambda: self._current().grpc,
            require_client_authentication=bool(self._files.client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        """A context for HTTP; each handshake goes on with that of the files as they are then."""

        def exchange(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._current().http

        context = _http_context(self._files)
        context.sni_callback = exchange
        return context

    def _current(self) -> _Loaded:
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + self._look_every_s
                self._look()
            return self._loaded

    def _look(self) -> None:
        try:
            stamp = _stamp(self._files)
            if stamp in (self._loaded.stamp, self._refused):
                return
            self._refused = stamp
            self._loaded = _load(self._files)
        except ConfigError as error:
            get_logger().error("certificates not taken up; those before stay in force", error=str(error))
            return
        get_logger().info("certificates taken up", cert=self._files.cert)


def server_tls(config: FrontendConfig) -> ServerTls | None:
    """The certificates, or None without TLS.

    Raises:
        ConfigError: only some of the files are given, or they cannot be used.
    """
    if not config.tls_cert and not config.tls_key and not config.tls_client_ca:
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError("tls_cert and tls_key (--tls-cert, --tls-key) are given together")
    return ServerTls(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))


def grpc_names(auth_context: Mapping[str, Any]) -> list[str]:
    """The names in the client certificate that gRPC has verified; none without one."""
    found = [*auth_context.get("x509_common_name", ()), *auth_context.get("x509_subject_alternative_name", ())]
    return [name.decode(errors="replace") for name in found]


def http_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """The same of the certificate, as `ssl` describes it, that a client of HTTP has shown."""
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
        # Other than the context for HTTP, gRPC would find out in the handshake that key and certificate do not match.
        http=_http_context(files),
        grpc=grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca),
    )
    if _stamp(files) != stamp:
        raise ConfigError("tls_cert, tls_key: the files are being written")
    return loaded


def _http_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert, tls_key: {files.cert} and {files.key} do not fit together ({error})") from None
    if files.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_client_ca: {files.client_ca} holds no certificates ({error})") from None
    return context


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """Changes when one of the files does, or what a link leads to."""
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
