"""Stores of the leader lease: etcd (its JSON gateway) and a Lease object of Kubernetes.

Both interfaces are plain HTTP with JSON. The standard library speaks it, so the scheduler needs no further package.
"""

import base64
import http.client
import io
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, parse_qsl, urlsplit

from scheduler_svc.standby.election import LeaseError, LeaseStore
from scheduler_svc.standby.tenure import next_number
from shared.config import ConfigError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which Kubernetes gives a pod its token, its namespace and the certificate of the API server."""
_ANNOTATION = "quire.dev/leader-number"
_MOST_BYTES = 1 << 20
_MOST_NUMBER = (1 << 63) - 1
_ATTEMPTS = 3
_NOT_FOUND, _CONFLICT = 404, 409


def is_remote(lease: str) -> bool:
    """Return whether a value of --leader-lease is a lease in a store and not a file on this machine."""
    return lease.startswith(("etcd:", "kubernetes:")) or lease == "kubernetes"


def open_store(
    lease: str,
    holder: str,
    duration_s: float,
    *,
    environ: Mapping[str, str] = os.environ,
    account: Path = _ACCOUNT,
) -> LeaseStore:
    """Return the store that a value of --leader-lease names.

    Args:
        lease: `etcd://HOST:PORT[,HOST:PORT...]/NAME[?ca=FILE&cert=FILE&key=FILE]`, `kubernetes` or
            `kubernetes://NAMESPACE/NAME`.
        holder: name of this scheduler, shown in the store.
        duration_s: duration of the lease, seconds.
        environ: variables in which Kubernetes names its API server.
        account: folder with the token, the namespace and the certificate for Kubernetes.

    Raises:
        ConfigError: the value or a file that it names is invalid.
    """
    try:
        parts = urlsplit(lease)
        if parts.scheme == "etcd":
            return _etcd(parts, holder, duration_s)
        return _kubernetes(parts, holder, duration_s, environ, account)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"leader_lease (--leader-lease): {lease}: {error}; use etcd://HOST:PORT/NAME, kubernetes, or"
            " kubernetes://NAMESPACE/NAME in a pod"
        ) from None


class _Http:
    """Requests with JSON to one of several servers.

    Args:
        servers: host and port of each server.
        tls: TLS settings; None for plain HTTP.
    """

    def __init__(self, servers: Sequence[str], tls: ssl.SSLContext | None) -> None:
        self._servers, self._tls = list(servers), tls

    def request(
        self, method: str, path: str, body: Any, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request and return the status and the decoded body. A server that fails is asked last from then on.

        Raises:
            LeaseError: no server responded.
        """
        failures = []
        content = json.dumps(body).encode() if body is not None else None
        for server in tuple(self._servers):
            connection = self._connect(server, timeout_s / len(self._servers))
            try:
                connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
                response = connection.getresponse()
                found = _object(response.read(_MOST_BYTES))
                if response.status < http.client.INTERNAL_SERVER_ERROR:
                    return response.status, found
                failures.append(f"{server}: status {response.status}: {_message(found)}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{server}: {error}")
            finally:
                connection.close()
            self._servers.append(self._servers.pop(0))
        raise LeaseError("; ".join(failures))

    def await_line(self, path: str, body: Any, part: bytes, timeout_s: float) -> bool:
        """Send a request to one server whose response is a stream of lines, and wait for a line with this part.

        Returns:
            Whether such a line arrived in time. If the server fails, it is asked last from then on.
        """
        connection = self._connect(self._servers[0], timeout_s)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            while response.status == http.client.OK:
                line = response.readline(_MOST_BYTES)
                if part in line:
                    return True
                if not line:
                    break
        except TimeoutError:
            pass
        except (OSError, http.client.HTTPException, ValueError):
            self._servers.append(self._servers.pop(0))
        finally:
            connection.close()
        return False

    def _connect(self, server: str, timeout_s: float) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(server, timeout=timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(server, timeout=timeout_s, context=self._tls)
        )
        end = time.monotonic() + timeout_s

        def respond(sock: socket.socket, *args: Any, **options: Any) -> http.client.HTTPResponse:
            return http.client.HTTPResponse(cast(socket.socket, _Until(sock, end)), *args, **options)

        connection.response_class = cast(type[http.client.HTTPResponse], respond)
        return connection


class _Until(io.RawIOBase):
    """Bytes of a socket that must arrive until a time.

    A timeout of the socket itself starts again with every byte, so a server that sends slowly could block the election
    for hours.

    Args:
        sock: the connected socket.
        end: the time (`time.monotonic`).
    """

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end
        self._bytes = sock.makefile("rb", buffering=0)

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the buffered bytes, as `http.client` requests them from a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has arrived.

        Raises:
            TimeoutError: the time has passed.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


class EtcdLease:
    """A lease in etcd 3.4 or newer: a key that etcd deletes when the lease ends, and a key with the last number."""

    def __init__(self, http_: _Http, name: str, holder: str, duration_s: float) -> None:
        self._http = http_
        self._leader, self._last = _base64(f"{name}/leader"), _base64(f"{name}/leader-number")
        self._holder = _base64(holder)
        self._duration_s = duration_s
        self._id = ""
        self.holder = ""
        self._revision = 0
        """Revision of the store at which another scheduler held the lease."""

    @property
    def token(self) -> str:
        """See `LeaseStore`."""
        return self._id

    def acquire(self, highest: int, timeout_s: float) -> int:
        """See `LeaseStore`."""
        reads = [{"request_range": {"key": key}} for key in (self._leader, self._last)]
        found = self._call("kv/txn", {"success": reads}, timeout_s)
        held, last = (_values(each) for each in found["responses"])
        if held:
            self._revision = int(found["header"]["revision"])
            self.holder = _text(held[0]["value"])
            return 0
        stored = _leader_number(_text(last[0]["value"])) if last else 0
        number = next_number(stored, highest, _now_ms())
        self._id = self._call("lease/grant", {"TTL": str(math.ceil(self._duration_s))}, timeout_s)["ID"]
        transaction = {
            "compare": [
                {"key": self._leader, "target": "CREATE", "create_revision": "0"},
                {"key": self._last, "target": "MOD", "mod_revision": last[0]["mod_revision"] if last else "0"},
            ],
            "success": [
                {"request_put": {"key": self._leader, "value": self._holder, "lease": self._id}},
                {"request_put": {"key": self._last, "value": _base64(str(number))}},
            ],
        }
        if self._call("kv/txn", transaction, timeout_s).get("succeeded"):
            return number
        self.revoke(self._id, timeout_s)
        return 0

    def is_held(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        found = self._call("kv/range", {"key": self._leader}, timeout_s)
        if "header" not in found:
            raise LeaseError(f"etcd: kv/range: no header: {_message(found)}")
        return bool(found.get("kvs"))

    def await_end(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        watch = {"key": self._leader, "start_revision": str(self._revision + 1), "filters": ["NOPUT"]}
        return self._http.await_line("/v3/watch", {"create_request": watch}, b'"events"', timeout_s)

    def renew(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        found = self._call("lease/keepalive", {"ID": self._id}, timeout_s)
        if "result" not in found:  # A proxy has responded, or etcd with an error.
            raise LeaseError(f"etcd: lease/keepalive: no result: {_message(found)}")
        if int(found["result"].get("TTL", 0)) > 0:
            return True
        try:
            held = self._call("kv/range", {"key": self._leader}, timeout_s).get("kvs", [])
        except LeaseError:
            held = []  # The name is only for the log. The lease has ended in any case.
        self.holder = _text(held[0]["value"]) if held else ""
        return False

    def revoke(self, token: str, timeout_s: float) -> None:
        """See `LeaseStore`."""
        self._call("lease/revoke", {"ID": token}, timeout_s)

    def _call(self, what: str, body: Any, timeout_s: float) -> Any:
        status, found = self._http.request("POST", f"/v3/{what}", body, timeout_s)
        if status not in (http.client.OK, _NOT_FOUND):
            raise LeaseError(f"etcd: {what}: status {status}: {_message(found)}")
        return found


class KubernetesLease:
    """A Lease object (coordination.k8s.io/v1), changed only by the version that was read before.

    Like client-go's leader election, a waiting scheduler counts the duration from when it saw the last change, so
    clocks need not agree.
    """

    def __init__(self, http_: _Http, namespace: str, name: str, holder: str, duration_s: float, token: Path) -> None:
        self._http, self._token = http_, token
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._holder, self._duration_s = name, holder, duration_s
        self.holder = ""
        self._seen = ("", 0.0)
        """Version of the object, and when it was first seen."""
        self._lease: Any = None
        """The object while this scheduler holds the lease."""

    def acquire(self, highest: int, timeout_s: float) -> int:
        """See `LeaseStore`."""
        lease = self._read(timeout_s)
        if lease is None:
            metadata = {"name": self._name, "annotations": {}}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
        elif not self._has_ended(lease):
            self.holder = lease["spec"]["holderIdentity"]
            return 0
        spec, annotations = lease["spec"], lease["metadata"].setdefault("annotations", {})
        number = next_number(_leader_number(annotations.get(_ANNOTATION, "0")), highest, _now_ms())
        annotations[_ANNOTATION] = str(number)
        now = _now()
        spec |= {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": math.ceil(self._duration_s),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": spec.get("leaseTransitions", 0) + 1,
        }
        self._lease = self._write(lease, timeout_s)
        return number if self._lease is not None else 0

    def is_held(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        lease = self._read(timeout_s)
        return lease is not None and not self._has_ended(lease)

    def renew(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        self._lease["spec"]["renewTime"] = _now()
        written = self._write(self._lease, timeout_s)
        if written is None:
            # Another program changed the object, for example its labels, or an earlier request has arrived after all.
            written = self._read(timeout_s)
            if written is None or not self._is_own(written, self.token):
                self.holder = "" if written is None else written["spec"].get("holderIdentity", "")
                return False
            written["spec"]["renewTime"] = _now()
            written = self._write(written, timeout_s)
        self._lease = written or self._lease
        return written is not None

    def await_end(self, timeout_s: float) -> bool:
        """See `LeaseStore`."""
        return False

    @property
    def token(self) -> str:
        """See `LeaseStore`."""
        return str(self._lease["metadata"]["annotations"][_ANNOTATION])

    def revoke(self, token: str, timeout_s: float) -> None:
        """See `LeaseStore`."""
        for _ in range(_ATTEMPTS):
            lease = self._read(timeout_s)
            if lease is None or not self._is_own(lease, token):
                return
            lease["spec"]["holderIdentity"] = ""
            if self._write(lease, timeout_s) is not None:
                return
        raise LeaseError("Kubernetes: other programs change the Lease object all the time")

    def _is_own(self, lease: Any, token: str) -> bool:
        found = lease["metadata"].get("annotations", {}).get(_ANNOTATION)
        return bool(lease["spec"].get("holderIdentity") == self._holder and found == token)

    def _has_ended(self, lease: Any) -> bool:
        spec = lease["spec"]
        if not spec.get("holderIdentity"):
            return True
        version, now = lease["metadata"]["resourceVersion"], time.monotonic()
        if version != self._seen[0]:
            self._seen = (version, now)
        duration_s: float = spec.get("leaseDurationSeconds", self._duration_s)
        return now - self._seen[1] > duration_s

    def _read(self, timeout_s: float) -> Any:
        status, found = self._call("GET", f"/{self._name}", None, timeout_s)
        return None if status == _NOT_FOUND else found

    def _write(self, lease: Any, timeout_s: float) -> Any:
        """Write the object and return it, or None if it has changed meanwhile.

        Raises:
            LeaseError: the response does not show that it was written.
        """
        is_new = "resourceVersion" not in lease["metadata"]
        method, path = ("POST", "") if is_new else ("PUT", f"/{self._name}")
        status, found = self._call(method, path, lease, timeout_s)
        if status in (_CONFLICT, _NOT_FOUND):
            return None
        if found["spec"].get("holderIdentity", "") != lease["spec"]["holderIdentity"]:
            raise LeaseError(f"Kubernetes: {method} {self._all}{path}: the response is not the Lease object")
        return found

    def _call(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, Any]:
        # Kubernetes replaces the token from time to time.
        try:
            headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        except OSError as error:
            raise LeaseError(str(error)) from None
        status, found = self._http.request(method, self._all + path, body, timeout_s, headers)
        if status >= http.client.BAD_REQUEST and status not in (_NOT_FOUND, _CONFLICT):
            raise LeaseError(f"Kubernetes: {method} {self._all}{path}: status {status}: {_message(found)}")
        return status, found


def _etcd(parts: SplitResult, holder: str, duration_s: float) -> LeaseStore:
    servers = [each for each in parts.netloc.split(",") if each]
    name = parts.path.strip("/")
    files = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if not servers or not name:
        raise ValueError("a server or the name is missing")
    if unknown := set(files) - {"ca", "cert", "key"}:
        raise ValueError(f"unknown parameter {min(unknown)}")
    tls = None
    if files:
        tls = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            tls.load_cert_chain(files["cert"], files.get("key"))
    return EtcdLease(_Http(servers, tls), name, holder, duration_s)


def _kubernetes(
    parts: SplitResult, holder: str, duration_s: float, environ: Mapping[str, str], account: Path
) -> LeaseStore:
    server = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not server:
        raise ValueError("KUBERNETES_SERVICE_HOST is not set, so this is no pod")
    namespace, name = parts.netloc or (account / "namespace").read_text().strip(), parts.path.strip("/") or "quire"
    tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    host = f"[{server}]" if ":" in server else server
    return KubernetesLease(_Http([f"{host}:{port}"], tls), namespace, name, holder, duration_s, account / "token")


def _object(content: bytes) -> Any:
    """Return the JSON object of a response; an empty one for no content.

    Raises:
        ValueError: the content is something else.
    """
    try:
        found = json.loads(content or b"{}")
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("JSON that is no object")
    return found


def _leader_number(text: str) -> int:
    number = int(text)
    if not 0 <= number < _MOST_NUMBER:
        raise ValueError(f"{text[:32]!r} is no leader number")
    return number


def _values(response: Any) -> list[Any]:
    found: list[Any] = response["response_range"].get("kvs", [])
    return found


def _message(found: Any) -> str:
    return str(found.get("message", ""))


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(value: str) -> str:
    return base64.b64decode(value).decode(errors="replace")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
