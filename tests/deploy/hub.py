"""A hub: an HTTP server that has the files of folders as models, as far as a download needs it."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "0" * 39 + "1"


class Hub(ThreadingHTTPServer):
    """The server.

    Args:
        models: the folder of each model, by its id.
        token: the token that a request must have; empty: none.
        host: the address to listen on.
    """

    daemon_threads = True

    def __init__(self, models: Mapping[str, Path], *, token: str = "", host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Request)
        self.models, self.token = models, token
        self.num_sent = 0
        """Files that were sent."""

    @property
    def address(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"


class _Request(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if self.server.token and self.headers.get("authorization") != f"Bearer {self.server.token}":
            return self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "a token is required"})
        for name, folder in self.server.models.items():
            if path.startswith(f"api/models/{name}"):
                files = sorted(each for each in folder.rglob("*") if each.is_file())
                if "/tree/" in path:
                    tree = [{"type": "file", "path": str(each.relative_to(folder)), "size": each.stat().st_size,
                             "oid": _digest(each)} for each in files]  # fmt: skip
                    return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
                siblings = [{"rfilename": str(each.relative_to(folder))} for each in files]
                about = {"id": name, "modelId": name, "sha": _COMMIT, "private": False, "siblings": siblings}
                return self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
            prefix = f"{name}/resolve/"
            file = folder / path.removeprefix(prefix).partition("/")[2]
            if path.startswith(prefix) and file.is_file():
                headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"}
                return self._send(200, file.read_bytes(), headers, is_file=True)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, body: bytes, headers: Mapping[str, str], *, is_file: bool = False) -> None:
        begin = 0
        if is_file and (asked := self.headers.get("range")):
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            code, headers = 206, {**headers, "Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.num_sent += is_file
        self.wfile.write(body[begin:])


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the end of the block."""
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join(10)
        hub.server_close()
