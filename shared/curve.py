"""Who may speak on the sockets between processes: CurveZMQ keys and the list of those that are let in.

A *key folder* is what one process owns: `own.key_secret` is its key pair, `scheduler.key` the public key of the
scheduler that a worker or front end connects to (a stranger's answers are not decrypted), and `allowed/workers` and
`allowed/frontends` the public keys that the scheduler lets in at each of its two sockets. Without that list anybody who
knows the scheduler's public key would get in; so there is no encryption without it. The list is read again when it
changes, so that keys are added, rotated and revoked while everything serves.

`quire keys` makes these folders. Where a folder holds one folder per role, each process takes its own.
"""

import ipaddress
import os
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from shared.config import ConfigError
from shared.logging import get_logger

SCHEDULER, WORKER, FRONTEND = "scheduler", "worker", "frontend"
ROLES = (SCHEDULER, WORKER, FRONTEND)
OWN, SERVER, ALLOWED = "own", "scheduler", "allowed"
DOMAINS = {WORKER: "workers", FRONTEND: "frontends"}
"""ZAP domain, and folder of public keys, of the peers of each role."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A process's keys."""

    folder: Path
    public: bytes
    secret: bytes

    def protect_server(self, socket: "zmq.Socket[bytes]", domain: str) -> None:
        """Before bind: only peers of this ZAP domain are let in."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True
        socket.zap_domain = domain.encode()

    def protect_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Before connect: only the scheduler whose public key is known is spoken to.

        Raises:
            ConfigError: its key is not in the folder.
        """
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = _load(self.folder / f"{SERVER}.key")[0]


def load_keys(folder: str, role: str) -> CurveKeys | None:
    """The keys of a process of this role; None when no folder is given.

    Raises:
        ConfigError: they are not there, or others may read them.
    """
    if not folder:
        return None
    path = Path(folder)
    if (path / role).is_dir():
        path = path / role
    secret_file = path / f"{OWN}.key_secret"
    public, secret = _load(secret_file)
    if secret is None:
        raise ConfigError(f"keys: {secret_file} holds no secret key; make one with quire keys create")
    if secret_file.stat().st_mode & 0o077:
        raise ConfigError(f"keys: {secret_file} can be read by others; chmod 600 it")
    return CurveKeys(path, public, secret)


class AllowList:
    """Answers ZeroMQ's questions who may come in, in a thread of its own."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys) -> None:
        """Serves both domains from the key folder.

        Raises:
            ConfigError: the scheduler's folder names nobody.
        """
        self._folders = {domain: keys.folder / ALLOWED / domain for domain in DOMAINS.values()}
        for folder in self._folders.values():
            if not folder.is_dir():
                raise ConfigError(f"keys: there is no {folder}; quire keys create makes it")
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._seen: dict[str, tuple[tuple[str, int], ...]] = {}
        self._unreadable: set[str] = set()
        """Domains whose list could not be read at the last look."""
        self._next_look = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Reads lists that have changed; cheap, to be called often."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        for domain, folder in self._folders.items():
            try:
                files = tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder)))
            except OSError as error:  # a key that is being revoked, or a folder that is being replaced
                if domain not in self._unreadable:
                    self._unreadable.add(domain)
                    get_logger().warning(
                        "the list of allowed keys cannot be read; it stays as it was", error=str(error)
                    )
                continue
            self._unreadable.discard(domain)
            if self._seen.get(domain) != files:
                self._seen[domain] = files
                self._authenticator.configure_curve(domain=domain, location=folder)

    def close(self) -> None:
        """Ends the thread."""
        self._authenticator.stop()


def check_bind(setting: str, address: str, *, protected: bool, insecure: bool) -> None:
    """Refuses to listen where strangers can reach it, unless it is protected or that is said to be wanted.

    Args:
        setting: the name of the setting that holds the address.
        address: a host, or a ZeroMQ address.
        protected: whether strangers would be turned away.
        insecure: whether they may come in.

    Raises:
        ConfigError: it would be open to strangers.
    """
    if protected or insecure or not is_routable(address):
        return
    remedy = "give keys (quire keys create)" if "://" in address else "give tls_cert and tls_key"
    raise ConfigError(
        f"{setting}: {address} can be reached from other machines by anybody; {remedy}, or say --insecure"
    )


def is_routable(address: str) -> bool:
    """Whether other machines may reach a host or a ZeroMQ address."""
    scheme, separator, rest = address.rpartition("://")
    if separator and scheme != "tcp":
        return False
    host = rest.rpartition(":")[0] if separator else rest
    host = host.strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # a name, an interface or "*"


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"keys: {path} cannot be read ({error}); quire keys create makes it") from None
