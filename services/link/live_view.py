"""One caller's live view: a bounded buffer of parts that the caller has not read yet."""

import asyncio
from collections import deque

from protos.quire.link.v1 import link_pb2
from shared.errors import QuireError

MAX_UNREAD_BYTES = 1 << 20
MAX_UNREAD_PARTS = 16
"""Maximum number of buffered parts. The core sends about five parts per second."""


class LiveView:
    """Buffer for one live view. When it is full, the oldest parts are dropped and their steps are counted."""

    def __init__(self) -> None:
        self._parts: deque[link_pb2.View] = deque()
        self._num_bytes = 0
        self._dropped = 0
        """Steps that were dropped before the oldest part."""
        self._error: QuireError | None = None
        self._changed = asyncio.Event()

    def put(self, part: link_pb2.View) -> None:
        self._parts.append(part)
        self._num_bytes += len(part.response)
        while len(self._parts) > MAX_UNREAD_PARTS or (self._num_bytes > MAX_UNREAD_BYTES and len(self._parts) > 1):
            oldest = self._parts.popleft()
            self._num_bytes -= len(oldest.response)
            self._dropped += oldest.steps
        self._changed.set()

    def fail(self, error: QuireError) -> None:
        """End the view with an error, at once."""
        self._error = error
        self._changed.set()

    async def next(self) -> tuple[bytes, int]:
        """Wait for a part; return it with the number of steps dropped before it.

        Raises:
            QuireError: the view has ended.
        """
        while not self._parts and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        part = self._parts.popleft()
        self._num_bytes -= len(part.response)
        dropped, self._dropped = self._dropped, 0
        return part.response, dropped
