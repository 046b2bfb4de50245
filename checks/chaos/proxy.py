"""Connections that can be cut: a proxy between workers and scheduler, in a thread of the test.

While a wire is cut, nothing passes in either direction and no error is reported, as with a dead link. When the wire is
mended, its existing connections are reset.
"""

import selectors
import socket
import threading
from pathlib import Path

_CHUNK = 1 << 16


class Wires:
    """One wire per worker."""

    def __init__(self, folder: Path, names: list[str], target: Path) -> None:
        """Listen immediately at `folder`/name for each worker, and connect each peer to `target`."""
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._names: dict[socket.socket, str] = {}
        self._cut: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._listeners: list[socket.socket] = []
        for name in names:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / name))
            listener.listen()
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, name)
        self._thread = threading.Thread(target=self._run, name="wires", daemon=True)
        self._thread.start()

    def cut(self, name: str) -> None:
        """Stop forwarding."""
        with self._lock:
            self._cut.add(name)

    def mend(self, name: str) -> None:
        """Accept new connections again; reset old ones."""
        with self._lock:
            self._cut.discard(name)
            for end in [end for end, owner in self._names.items() if owner == name]:
                self._close(end)

    def close(self) -> None:
        """Stop the thread and close everything."""
        self._stopping = True
        self._thread.join()
        for end in [*self._peers, *self._listeners]:
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.02):
                assert isinstance(key.fileobj, socket.socket)
                with self._lock:
                    if key.data is None:
                        self._forward(key.fileobj)
                    else:
                        self._accept(key.fileobj, key.data)

    def _accept(self, listener: socket.socket, name: str) -> None:
        near, _ = listener.accept()
        if name in self._cut:
            near.close()
            return
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(str(self._target))
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one], self._names[one] = other, name
            self._selector.register(one, selectors.EVENT_READ, None)

    def _forward(self, end: socket.socket) -> None:
        if end not in self._peers:
            return  # The socket was closed while its event was pending.
        if self._names[end] in self._cut:
            # Do not read: bytes sent into a cut wire stay in the sender's buffer and are lost with it.
            self._selector.unregister(end)
            return
        try:
            data = end.recv(_CHUNK)
            if data:
                self._peers[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(end)

    def _close(self, end: socket.socket) -> None:
        for each in (end, self._peers.pop(end, None)):
            if each is None or each.fileno() < 0:
                continue
            self._peers.pop(each, None)
            self._names.pop(each, None)
            if each in self._selector.get_map():
                self._selector.unregister(each)
            each.close()
