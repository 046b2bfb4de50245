"""Servers that store a leader lease: a real etcd, and an API server with the rules of Kubernetes for one object."""

import contextlib
import copy
import json
import shutil
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from measure.testbed import etcd as testbed

TOKEN = "of the pod"


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run etcd; yield host and port, and the process. Skip the test if etcd is not installed."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed")
    with testbed.etcd(folder) as server:
        yield server.address, server.process


@contextlib.contextmanager
def responding(*parts: bytes, pause_s: float = 0.0) -> Iterator[tuple[str, list[bytes]]]:
    """Run a server that sends these parts in response to every request; yield host and port, and the requests."""
    requests: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.request.recv(1 << 16))
            with contextlib.suppress(OSError):
                for part in parts:
                    self.request.sendall(part)
                    time.sleep(pause_s)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield "{}:{}".format(*server.server_address), requests
        server.shutdown()


@dataclass(slots=True)
class LeaseObject:
    """The object that the API server stores; a write must name the version that it replaces."""

    content: Any = None
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, method: str, name: str, body: Any) -> tuple[int, Any]:
        """Return status and body of the response to a request."""
        with self.lock:
            if method == "GET":
                found = self.content is not None and self.content["metadata"]["name"] == name
                return (200, self.content) if found else (404, {"message": "not found"})
            current = None if self.content is None else self.content["metadata"]["resourceVersion"]
            if body["metadata"].get("resourceVersion") != current:
                return 409, {"message": "the object has been modified"}
            self.version += 1
            self.content = copy.deepcopy(body)
            self.content["metadata"]["resourceVersion"] = str(self.version)
            return (201 if method == "POST" else 200), self.content


@contextlib.contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[dict[str, str], Path, LeaseObject]]:
    """Run an API server with TLS; yield the variables and the folder that a pod has, and the stored object."""
    stored = LeaseObject()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
            where, _, name = self.path.partition("/namespaces/quire/leases")
            assert where == "/apis/coordination.k8s.io/v1"
            if self.headers["Authorization"] == f"Bearer {TOKEN}":
                status, found = stored.handle(self.command, name.strip("/"), body)
            else:
                status, found = 401, {"message": "Unauthorized"}
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _handle  # noqa: N815  # names that http.server looks up

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    account = folder / "account"
    account.mkdir()
    (account / "namespace").write_text("quire")
    (account / "token").write_text(TOKEN)
    authority.cert_pem.write_to_path(account / "ca.crt")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
    try:
        yield environ, account, stored
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
