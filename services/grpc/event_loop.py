"""Event loop that handles gRPC's completions together.

A thread of grpc.aio writes one byte to a socket for every completion, for example for every message that was sent. For
each byte, the event loop runs one iteration, whose callback handles all completions so far. When a scheduler frame has
tokens for a hundred streams, the first iteration therefore handles a hundred completions, and the others find nothing.
This loop discards the bytes of completions that are about to be handled, so that one iteration suffices.
"""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

_MOST_BYTES = 4096


class EventLoop(uvloop.Loop):
    """uvloop's event loop with fewer iterations for gRPC."""

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Call `callback` when a descriptor or socket is readable. Only gRPC watches a socket object."""
        if isinstance(fd, socket.socket):
            callback, args = partial(_read_together, fd, callback, args), ()
        super().add_reader(fd, callback, *args)


def _read_together(wakeups: socket.socket, handle: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Discard all pending bytes but one, which `handle` reads before it handles all completions.

    gRPC adds a completion to its queue before it writes the byte, so no completion is missed.
    """
    try:
        num_bytes = len(wakeups.recv(_MOST_BYTES, socket.MSG_PEEK))
        if num_bytes > 1:
            wakeups.recv(num_bytes - 1)
    except BlockingIOError:
        pass
    handle(*args)
