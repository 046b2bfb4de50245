"""CurveZMQ authentication and encryption for the sockets between processes.

A *key folder* belongs to one process. `own.key_secret` is its key pair. `scheduler.key` is the public key of the
scheduler to which a worker or front end connects; messages encrypted with another key are rejected. `allowed/workers`
and `allowed/frontends` contain the public keys that the scheduler accepts at its two sockets, `allowed/schedulers`
those that it accepts from standbys. All schedulers of a service have the same key. Without these lists, every process
that knows the scheduler's public key could connect, so encryption requires them. A list is reloaded when it changes, so
keys can be added, rotated and revoked during operation.

`quire keys` creates these folders. If a folder has one subfolder per role, each process uses the subfolder of its role.
"""

import ipaddress
import os
import time
from collections.abc import Collection
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
STANDBY_DOMAIN = "schedulers"
"""ZAP domain of the socket for standbys."""
"""ZAP domain for each role of a peer, which is also the name of the folder with the public keys."""
_CHECK_INTERVAL_S = 1.0
"""Minimum interval of checks for changed lists, seconds."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pair and key folder of a process."""

    folder: Path
    public: bytes
    secret: bytes

    def protect_server(self, socket: "zmq.Socket[bytes]", domain: str) -> None:
        """Require that peers authenticate with a key in this ZAP domain; call before bind."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_server = True
        socket.zap_domain = domain.encode()

    def protect_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Require that the peer is the scheduler with the known public key; call before connect.

        Raises:
            ConfigError: the folder contains no scheduler key.
        """
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = _load(self.folder / f"{SERVER}.key")[0]

    def protect_scheduler(self, socket: "zmq.Socket[bytes]") -> None:
        """Require that the peer is another scheduler of this service, which has the same key; call before connect."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = self.public


def load_keys(folder: str, role: str) -> CurveKeys | None:
    """Load the keys for a process with this role; return None without a folder.

    Raises:
        ConfigError: the keys do not exist, or other users can read them.
    """
    if not folder:
        return None
    path = Path(folder)
    if (path / role).is_dir():
        path = path / role
    secret_file = path / f"{OWN}.key_secret"
    public, secret = _load(secret_file)
    if secret is None:
        raise ConfigError(f"keys: {secret_file} contains no secret key; create one with quire keys create")
    if _readable_by_others(secret_file.stat(), {os.getgid(), *os.getgroups()}):
        raise ConfigError(f"keys: {secret_file} is readable by other users; run chmod 600 on it")
    return CurveKeys(path, public, secret)


class AllowList:
    """Holds the allowed public keys; its thread handles ZeroMQ's authentication requests (ZAP)."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", keys: CurveKeys, domains: Collection[str] = ()
    ) -> None:
        """Load the lists of the given domains from the key folder; without domains, of workers and front ends.

        Raises:
            ConfigError: the folder contains no lists.
        """
        self._folders = {domain: keys.folder / ALLOWED / domain for domain in domains or DOMAINS.values()}
        for folder in self._folders.values():
            if not folder.is_dir():
                raise ConfigError(f"keys: {folder} does not exist; run `quire keys create` to create it")
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._seen: dict[str, tuple[tuple[str, int], ...]] = {}
        self._unreadable: set[str] = set()
        """Domains whose list could not be read at the last check."""
        self._next_check = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Reload the lists that have changed. Frequent calls are cheap."""
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + _CHECK_INTERVAL_S
        for domain, folder in self._folders.items():
            try:
                files = tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder)))
            except OSError as error:  # A key is being revoked, or the folder is being replaced.
                if domain not in self._unreadable:
                    self._unreadable.add(domain)
                    get_logger().warning(
                        "reload of the allowed keys failed; keeping the previous list", error=str(error)
                    )
                continue
            self._unreadable.discard(domain)
            if self._seen.get(domain) != files:
                self._seen[domain] = files
                self._authenticator.configure_curve(domain=domain, location=folder)
                get_logger().info("allowed keys loaded", domain=domain)

    def close(self) -> None:
        """Stop the thread."""
        self._authenticator.stop()


def check_bind(setting: str, address: str, *, protected: bool, insecure: bool) -> None:
    """Reject an address that other machines can reach without authentication, unless `insecure` permits it.

    Args:
        setting: name of the setting that contains the address.
        address: a host, or a ZeroMQ address.
        protected: whether peers must authenticate.
        insecure: whether unauthenticated peers are permitted.

    Raises:
        ConfigError: the address is reachable and not protected.
    """
    if protected or insecure or not is_routable(address):
        return
    remedy = "give keys (quire keys create)" if "://" in address else "give tls_cert and tls_key"
    raise ConfigError(
        f"{setting}: {address} is reachable from other machines without authentication; {remedy}, or set --insecure"
    )


def is_routable(address: str) -> bool:
    """Return whether other machines may reach a host or a ZeroMQ address."""
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
        return True  # The address is a host name, an interface name or "*".


def _readable_by_others(status: os.stat_result, own_groups: set[int]) -> bool:
    """Return whether other users can read a file.

    Group access is accepted if root owns the file and this process is in the group, because Kubernetes mounts secrets
    this way for non-root processes (`fsGroup`).
    """
    if status.st_uid == 0 and status.st_gid != 0 and status.st_gid in own_groups:
        return bool(status.st_mode & 0o037)
    return bool(status.st_mode & 0o077)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"keys: {path} cannot be read ({error}); create it with quire keys create") from None
