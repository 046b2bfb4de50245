"""The bell between a stream and its reader: cheaper than asyncio.Event, for exactly one waiting task."""

import asyncio


class Wakeup:
    """Rung by whoever has something; the reader checks first and waits only when there was nothing.

    Between that check and awaiting `rung` the reader must not await anything else, then no ring is missed.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        """Must be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wakes the reader if it waits."""
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():
                waiting.set_result(None)

    def rung(self) -> "asyncio.Future[None]":
        """Done at the next ring."""
        waiting = self._waiting = self._loop.create_future()
        return waiting
