"""Wakes up a single waiting task; cheaper than asyncio.Event."""

import asyncio


class Wakeup:
    """Signal from producers to one consumer.

    The consumer first checks for data and waits only if there is none. Between this check and awaiting `rung`, it must
    not await anything else. Otherwise it may miss a signal.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        """Create the signal, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the consumer if it waits."""
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():
                waiting.set_result(None)

    def rung(self) -> "asyncio.Future[None]":
        """Future that completes at the next ring."""
        waiting = self._waiting = self._loop.create_future()
        return waiting
