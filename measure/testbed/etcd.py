"""A real etcd server as a context manager, for leader leases."""

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure.testbed.service import PATIENCE_S, free_ports


class MissingEtcdError(RuntimeError):
    """The program `etcd` is not installed."""


class Etcd:
    """A server that can be killed and started again.

    Args:
        folder: its data.
        host: address on which it listens.

    Raises:
        MissingEtcdError: etcd is not installed.
    """

    def __init__(self, folder: Path, host: str) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise MissingEtcdError("etcd: not installed; install it, for example as the Debian package etcd-server")
        client, peer = (f"{host}:{port}" for port in free_ports(2))
        self.address = client
        """HOST:PORT for clients."""
        self._command = [
            program,
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls=http://{client}",
            f"--advertise-client-urls=http://{client}",
            f"--listen-peer-urls=http://{peer}",
            f"--initial-advertise-peer-urls=http://{peer}",
            f"--initial-cluster=default=http://{peer}",
        ]
        self.start()

    def start(self) -> None:
        """Start the server with the data that it had, and wait until it serves."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + PATIENCE_S
        while not self._is_healthy():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"etcd: {self.address} does not serve")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        self.process.kill()
        self.process.wait()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=5)
        try:
            connection.request("GET", "/health")
            return b"true" in connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()


@contextmanager
def etcd(folder: Path, host: str = "127.0.0.1") -> Iterator[Etcd]:
    """Run etcd with its data in `folder`.

    Raises:
        MissingEtcdError: etcd is not installed.
    """
    server = Etcd(folder, host)
    try:
        yield server
    finally:
        server.kill()
