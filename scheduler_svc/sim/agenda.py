"""Virtual time: what will happen when, in order; ties happen in the order in which they were put down."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Acts by time. `now` only grows and is moved by whoever runs the simulation."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._entries: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, act: Callable[..., object], *arguments: object) -> None:
        """Calls `act(*arguments)` once `delay` seconds have passed."""
        self._count += 1
        heapq.heappush(self._entries, (self.now + delay, self._count, act, arguments))

    def next_time(self) -> float | None:
        """When the next act is due."""
        return self._entries[0][0] if self._entries else None

    def run_due(self, most: int) -> None:
        """Runs what is due by now, at most `most` acts."""
        entries = self._entries
        while entries and entries[0][0] <= self.now and most:
            _, _, act, arguments = heapq.heappop(entries)
            act(*arguments)
            most -= 1
