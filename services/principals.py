"""Who calls, and what they may: from a bearer token or a client certificate to a principal.

The file (TOML) lists principals; of a token it holds only the SHA-256, which is enough because tokens are random and
long. `quire keys token` makes one.

    [principals.search]
    tokens = ["3c0d…"]                     # SHA-256 of the token, hex
    certificates = ["search.example.org"]  # common name or DNS name of a client certificate
    tenants = ["search", "batch"]          # may act for; the first is the default; "*": for all
    cache_scopes = ["team"]                # may share cached prefixes under these names; "*": all
    admin = true                           # may use the operator API

It is read again when it changes; one that cannot be read leaves the one before in force. Without a file everybody is
`anonymous`, who may act for every tenant, and is an operator where only this machine can call.
"""

import hashlib
import hmac
import os
import time
import tomllib
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config import ConfigError
from shared.errors import PermissionDeniedError, UnauthenticatedError
from shared.logging import get_logger

ANY = "*"
ANONYMOUS_NAME = "anonymous"
MAX_TOKEN_BYTES = 4096
_LOOK_EVERY_S = 1.0
_SCHEME = "bearer "
_FIELDS = {"tokens", "certificates", "tenants", "cache_scopes", "admin"}


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who may call."""

    name: str
    tenants: tuple[str, ...] = (ANY,)
    cache_scopes: tuple[str, ...] = (ANY,)
    is_admin: bool = False

    def tenant(self, asked: str) -> str:
        """The tenant that a request counts for.

        Raises:
            PermissionDeniedError: the principal may not act for the one that was asked for.
        """
        if not asked:
            return "" if self.tenants[:1] in ((), (ANY,)) else self.tenants[0]
        if ANY in self.tenants or asked in self.tenants:
            return asked
        raise PermissionDeniedError(f"scheduling.tenant: {self.name} may not act for this tenant")

    def check_scope(self, asked: str) -> None:
        """Whether the principal may share cached prefixes under this name.

        Raises:
            PermissionDeniedError: it may not.
        """
        if asked and ANY not in self.cache_scopes and asked not in self.cache_scopes:
            raise PermissionDeniedError(f"scheduling.cache_scope: {self.name} may not use this scope")

    def check_admin(self) -> None:
        """Whether the principal is an operator.

        Raises:
            PermissionDeniedError: it is not.
        """
        if not self.is_admin:
            raise PermissionDeniedError(f"{self.name} is no operator; the operator API needs a principal with admin")


_NOBODY = Principal(ANONYMOUS_NAME)
CURRENT: ContextVar[Principal] = ContextVar("principal", default=_NOBODY)
"""Who makes the call that the present task serves; set at the border, before anything else is done for it."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What the file says."""

    by_digest: list[tuple[bytes, Principal]] = field(default_factory=list)
    by_certificate: dict[str, Principal] = field(default_factory=dict)


class Principals:
    """Tells who calls."""

    def __init__(self, path: str, *, anonymous_is_admin: bool) -> None:
        """Reads the file, if there is one.

        Raises:
            ConfigError: it cannot be used; the message says which entry and why.
        """
        self._path = Path(path) if path else None
        self._anonymous = Principal(ANONYMOUS_NAME, is_admin=anonymous_is_admin)
        self._mtime = 0
        self._next_look = 0.0
        self._known = _Known()
        if self._path is not None:
            self._mtime = _mtime(self._path)
            self._known = _read(self._path)

    def identify(self, authorization: str, certificate_names: Iterable[str] = ()) -> Principal:
        """The principal of a call.

        Args:
            authorization: the call's Authorization header; may be empty.
            certificate_names: of a client certificate that TLS has verified.

        Raises:
            UnauthenticatedError: it is nobody who is known.
        """
        if self._path is None:
            return self._anonymous
        self._refresh()
        if authorization:
            return self._by_token(authorization)
        for name in certificate_names:
            if (principal := self._known.by_certificate.get(name)) is not None:
                return principal
        raise UnauthenticatedError("who is calling? give a token: 'authorization: Bearer …'")

    def _by_token(self, authorization: str) -> Principal:
        token = authorization[len(_SCHEME) :].strip() if authorization.lower().startswith(_SCHEME) else ""
        encoded = token.encode()
        if not 0 < len(encoded) <= MAX_TOKEN_BYTES:
            raise UnauthenticatedError("the authorization is no bearer token")
        digest = hashlib.sha256(encoded).digest()
        found = None
        # All of them, always: how long it takes says nothing about which one was nearly right.
        for known, principal in self._known.by_digest:
            if hmac.compare_digest(known, digest):
                found = principal
        if found is None:
            raise UnauthenticatedError("nobody has this token")
        return found

    def _refresh(self) -> None:
        if (now := time.monotonic()) < self._next_look or self._path is None:
            return
        self._next_look = now + _LOOK_EVERY_S
        try:
            mtime = _mtime(self._path)
            if mtime == self._mtime:
                return
            self._mtime = mtime
            self._known = _read(self._path)
        except ConfigError as error:
            get_logger().error("principals not read again; those before stay in force", error=str(error))
            return
        get_logger().info("principals read again", tokens=len(self._known.by_digest))


def _mtime(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise ConfigError(f"principals: {path} cannot be read ({error.strerror})") from None


def _read(path: Path) -> _Known:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"principals: {path} cannot be read ({error})") from None
    known = _Known()
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
                raise ConfigError(f"principals: {path}: tokens of {name}: give the SHA-256 of the token, in hex")
            known.by_digest.append((digest, principal))
        for certificate in _strings(path, name, entry, "certificates"):
            known.by_certificate[certificate] = principal
    return known


def _entries(path: Path, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    entries = content.get("principals", {})
    if set(content) - {"principals"} or not isinstance(entries, dict):
        raise ConfigError(f"principals: {path} may hold [principals.NAME] tables only")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or (unknown := set(entry) - _FIELDS):
            what = min(unknown) if isinstance(entry, dict) else name
            raise ConfigError(f"principals: {path}: {name} has an unknown entry {what!r}")
        if not isinstance(entry.get("admin", False), bool):
            raise ConfigError(f"principals: {path}: admin of {name} must be true or false")
    return entries


def _strings(path: Path, name: str, entry: dict[str, Any], key: str) -> list[str]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"principals: {path}: {key} of {name} must be a list of texts")
    return value
