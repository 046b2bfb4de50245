"""Authentication and permissions: maps a bearer token or a client certificate to a principal.

A TOML file lists the principals. It contains only the SHA-256 of a token, which is safe because tokens are long and
random. `quire keys token` generates a token.

    [principals.search]
    tokens = ["3c0d…"]                     # SHA-256 of the token, hex
    certificates = ["search.example.org"]  # common name or DNS name of a client certificate
    tenants = ["search", "batch"]          # allowed tenants; the first is the default; "*": all
    cache_scopes = ["team"]                # allowed names of shared prefix caches; "*": all
    admin = true                           # may use the operator API

    [anonymous]                            # serve callers without a known token or certificate, too
    tenants = ["*"]

The file is reloaded when it changes. If reloading fails, the previous principals remain valid. Without a file, every
caller is `anonymous` and may act for every tenant. Such callers are operators if only this machine can connect. With a
file, callers without known credentials are refused, or get the permissions in the table `[anonymous]`. They never get
operator permissions.

API keys are a simpler alternative: a caller with an API key as bearer token has the permissions of `anonymous`, and
other callers are refused. A file and API keys can be combined.
"""

import hashlib
import hmac
import os
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config import ConfigError
from shared.config_sources import API_KEY_VARIABLE
from shared.errors import FieldDeniedError, PermissionDeniedError, UnauthenticatedError
from shared.logging import get_logger

ANY = "*"
ANONYMOUS_NAME = "anonymous"
MAX_TOKEN_BYTES = 4096
"""Maximum length of a bearer token."""
_CHECK_INTERVAL_S = 1.0
"""Minimum interval of checks for a changed file, seconds."""
_SCHEME = "bearer "
_FIELDS = {"tokens", "certificates", "tenants", "cache_scopes", "admin"}
_ANONYMOUS_FIELDS = {"tenants", "cache_scopes"}


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller and its permissions."""

    name: str
    tenants: tuple[str, ...] = (ANY,)
    cache_scopes: tuple[str, ...] = (ANY,)
    is_admin: bool = False

    def tenant(self, asked: str) -> str:
        """Return the tenant that the request is charged to.

        Raises:
            PermissionDeniedError: the principal may not act for the requested tenant.
        """
        if not asked:
            return "" if self.tenants[:1] in ((), (ANY,)) else self.tenants[0]
        if ANY in self.tenants or asked in self.tenants:
            return asked
        raise FieldDeniedError(
            "scheduling.tenant", f"principal {self.name} may not act for this tenant; use one of its own"
        )

    def check_scope(self, asked: str) -> None:
        """Check that the principal may share cached prefixes under this name.

        Raises:
            PermissionDeniedError: the principal may not use the name.
        """
        if asked and ANY not in self.cache_scopes and asked not in self.cache_scopes:
            raise FieldDeniedError(
                "scheduling.cache_scope", f"principal {self.name} may not use this scope; use one of its own"
            )

    def check_admin(self) -> None:
        """Check that the principal is an operator.

        Raises:
            PermissionDeniedError: the principal is not an operator.
        """
        if not self.is_admin:
            raise PermissionDeniedError(
                f"admin API: principal {self.name} is not an admin; use credentials of a principal with admin = true"
            )


_ANONYMOUS = Principal(ANONYMOUS_NAME)
CURRENT: ContextVar[Principal] = ContextVar("principal", default=_ANONYMOUS)
"""Principal of the call that the current task serves. The boundary sets it before the call is processed."""


def read_api_keys(variable: str, path: str) -> list[str]:
    """Return the API keys from the variable and the file.

    Args:
        variable: keys separated by commas; may be empty.
        path: file with one key per line; empty for none.

    Raises:
        ConfigError: the file cannot be read or contains no key, or a key is not a possible bearer token.
    """
    keys = {f"{API_KEY_VARIABLE}, key {number}": key for number, key in enumerate(_words(variable.split(",")), 1)}
    if path:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"api_key_file: {path} cannot be read ({error})") from None
        found = {f"api_key_file: {path}, key {number}": key for number, key in enumerate(_words(lines), 1)}
        if not found:
            raise ConfigError(f"api_key_file: {path} contains no key; write one per line")
        keys |= found
    for where, key in keys.items():
        if len(key) > MAX_TOKEN_BYTES or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where}: not a bearer token; use up to {MAX_TOKEN_BYTES} visible ASCII characters without blanks"
            )
    return list(keys.values())


def _words(texts: Iterable[str]) -> list[str]:
    return [text.strip() for text in texts if text.strip()]


@dataclass(frozen=True, slots=True)
class _Known:
    """Content of the file."""

    by_digest: list[tuple[bytes, Principal]] = field(default_factory=list)
    by_certificate: dict[str, Principal] = field(default_factory=dict)
    anonymous: Principal | None = None
    """Principal of callers without known credentials; None if they are refused."""


class Principals:
    """Authenticates callers."""

    def __init__(self, path: str, *, api_keys: Sequence[str] = (), anonymous_is_admin: bool) -> None:
        """Read the file, if there is one.

        Args:
            path: the file; empty for none.
            api_keys: the API keys that are accepted.
            anonymous_is_admin: whether a caller that the file does not name may use the operator API.

        Raises:
            ConfigError: the file is invalid; the message names the entry.
        """
        self._path = Path(path) if path else None
        self._anonymous = Principal(ANONYMOUS_NAME, is_admin=anonymous_is_admin)
        self._api_keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._mtime = 0
        self._next_check = 0.0
        self._known = _Known()
        if self._path is not None:
            self._mtime = _mtime(self._path)
            self._known = _read(self._path)

    def identify(self, authorization: str, certificate_names: Iterable[str] = ()) -> Principal:
        """Return the principal of a call.

        Args:
            authorization: the Authorization header; may be empty.
            certificate_names: names in a client certificate that TLS has verified.

        Raises:
            UnauthenticatedError: credentials are missing or unknown.
        """
        if self._path is None and not self._api_keys:
            return self._anonymous
        self._refresh()
        if authorization:
            return self._by_token(authorization)
        for name in certificate_names:
            if (principal := self._known.by_certificate.get(name)) is not None:
                return principal
        if self._known.anonymous is not None:
            return self._known.anonymous
        raise UnauthenticatedError(
            "missing credentials: send 'authorization: Bearer TOKEN' or a known client certificate"
        )

    def _by_token(self, authorization: str) -> Principal:
        token = authorization[len(_SCHEME) :].strip() if authorization.lower().startswith(_SCHEME) else ""
        encoded = token.encode()
        if not 0 < len(encoded) <= MAX_TOKEN_BYTES:
            if self._known.anonymous is not None:
                return self._known.anonymous
            raise UnauthenticatedError("authorization: not a bearer token; send 'authorization: Bearer TOKEN'")
        digest = hashlib.sha256(encoded).digest()
        found = None
        # Compare with all digests in constant time, so that the duration reveals nothing about the digests.
        for known in self._api_keys:
            if hmac.compare_digest(known, digest):
                found = self._anonymous
        for known, principal in self._known.by_digest:
            if hmac.compare_digest(known, digest):
                found = principal
        # Clients of OpenAI's API send a placeholder key if the service requires none.
        found = found or self._known.anonymous
        if found is None:
            raise UnauthenticatedError("authorization: unknown token")
        return found

    def _refresh(self) -> None:
        if (now := time.monotonic()) < self._next_check or self._path is None:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        try:
            mtime = _mtime(self._path)
            if mtime == self._mtime:
                return
            self._mtime = mtime
            self._known = _read(self._path)
        except ConfigError as error:
            get_logger().error("principals reload failed; keeping the previous principals", error=str(error))
            return
        get_logger().info("principals reloaded", tokens=len(self._known.by_digest))


def _mtime(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        raise ConfigError(f"principals: {path} does not exist; create it with quire keys principal") from None
    except OSError as error:
        raise ConfigError(f"principals: {path} cannot be read ({error.strerror})") from None


def _read(path: Path) -> _Known:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"principals: {path} cannot be read ({error})") from None
    known = _Known(anonymous=_anonymous(path, content))
    for name, entry in _entries(path, content).items():
        principal = Principal(
            name,
            tuple(_strings(path, name, entry, "tenants")),
            tuple(_strings(path, name, entry, "cache_scopes")),
            bool(entry.get("admin", False)),
        )
        for text in _strings(path, name, entry, "tokens"):
            try:
                digest = bytes.fromhex(text.removeprefix("sha256:"))
            except ValueError:
                digest = b""
            if len(digest) != hashlib.sha256().digest_size:
                raise ConfigError(
                    f"principals: {path}: tokens of {name}: not a SHA-256 digest; use the SHA-256 of the token in hex"
                )
            known.by_digest.append((digest, principal))
        for certificate in _strings(path, name, entry, "certificates"):
            known.by_certificate[certificate] = principal
    return known


def _anonymous(path: Path, content: dict[str, Any]) -> Principal | None:
    entry = content.get(ANONYMOUS_NAME)
    if entry is None:
        return None
    if not isinstance(entry, dict) or (unknown := set(entry) - _ANONYMOUS_FIELDS):
        what = f"unknown entry {min(unknown)!r}" if isinstance(entry, dict) else "not a table"
        raise ConfigError(f"principals: {path}: [{ANONYMOUS_NAME}]: {what}; use {', '.join(sorted(_ANONYMOUS_FIELDS))}")
    return Principal(
        ANONYMOUS_NAME,
        tuple(_strings(path, ANONYMOUS_NAME, entry, "tenants")),
        tuple(_strings(path, ANONYMOUS_NAME, entry, "cache_scopes")),
    )


def _entries(path: Path, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    entries = content.get("principals", {})
    if set(content) - {"principals", ANONYMOUS_NAME} or not isinstance(entries, dict):
        raise ConfigError(
            f"principals: {path}: invalid structure; use [principals.NAME] tables, and [{ANONYMOUS_NAME}]"
        )
    for name, entry in entries.items():
        if not isinstance(entry, dict) or (unknown := set(entry) - _FIELDS):
            what = min(unknown) if isinstance(entry, dict) else name
            raise ConfigError(f"principals: {path}: unknown entry {what!r} of {name}; use {', '.join(sorted(_FIELDS))}")
        if name == ANONYMOUS_NAME:
            raise ConfigError(f"principals: {path}: {name} is the name of callers without credentials; use [{name}]")
        if not isinstance(entry.get("admin", False), bool):
            raise ConfigError(f"principals: {path}: admin of {name} must be true or false")
    return entries


def _strings(path: Path, name: str, entry: dict[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"principals: {path}: {key} of {name} must be a list of strings")
    return value
