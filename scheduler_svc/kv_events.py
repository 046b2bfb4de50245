"""KV events: reports changes of the prefix caches to endpoint pickers, in the format of vLLM's `kv_events`.

A PUB socket connects to the endpoint picker's SUB socket. A message has three frames: the topic `kv@FRONTEND@MODEL`, a
sequence number (8 bytes, big-endian), and a batch in msgpack. Because every front end of the cell is an endpoint for
the endpoint picker, all events are sent under each front end's name. For a new front end, and for all front ends when
an endpoint picker subscribes, the events begin with AllBlocksCleared and all cached blocks. Hashes are the last 8 bytes
of the block's key.
"""

import time
from collections.abc import Iterable

import msgpack
import zmq

from scheduler_svc.cache_changes import CacheChanges, Change, Stored
from shared.prefix_keys import BlockKey

MEDIUM = "GPU"
"""Tier name in events: the worker's own memory, even on a CPU."""
_HASH_BYTES = 8
_SUBSCRIBED = b"\x01"
"""First byte of a subscription message."""
_MAX_QUEUED = 10_000
"""Maximum number of messages queued for a slow or absent endpoint picker. Further messages are lost, as in vLLM."""


class KvEvents:
    """Publisher of a scheduler."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        """Connect to an endpoint picker; it may start later.

        Args:
            context: ZeroMQ context of the scheduler's sockets.
            address: address of the endpoint picker's SUB socket.
        """
        self.changes = CacheChanges()
        # Report every subscription, so that an endpoint picker gets all blocks when it reconnects.
        self._socket = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._numbers: dict[str, int] = {}
        """By front end: the number of its next message."""

    def publish(self, model: str, frontends: Iterable[str], epochs: set[int]) -> None:
        """Send the changes since the last call.

        Args:
            model: the served model's name.
            frontends: names of the connected front ends.
            epochs: epochs of the connected workers.
        """
        changes = [encode(change) for change in self.changes.collect(epochs)]
        is_asked = False
        while self._socket.poll(0):
            is_asked |= self._socket.recv().startswith(_SUBSCRIBED)
        names = set(frontends)
        for name in self._numbers.keys() - names:
            del self._numbers[name]
        for name in sorted(names):
            if is_asked or name not in self._numbers:
                self._send(name, model, [["AllBlocksCleared"], *map(encode, self.changes.present())])
            elif changes:
                self._send(name, model, changes)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send(self, frontend: str, model: str, events: list[list[object]]) -> None:
        number = self._numbers.get(frontend, 0)
        self._numbers[frontend] = number + 1
        batch = msgpack.packb([time.time(), events, None])
        self._socket.send_multipart([f"kv@{frontend}@{model}".encode(), number.to_bytes(8, "big"), batch])


def encode(change: Change) -> list[object]:
    """Return a change as vLLM's event: a tag and the fields by position."""
    hashes = [_hash(key) for key in change.keys]
    if isinstance(change, Stored):
        parent = None if change.parent is None else _hash(change.parent)
        return ["BlockStored", hashes, parent, list(change.tokens), change.block_size, None, MEDIUM, None]
    return ["BlockRemoved", hashes, MEDIUM]


def _hash(key: BlockKey) -> bytes:
    return key[-_HASH_BYTES:]
