"""Virtual time: scheduled actions ordered by time. Actions at the same time run in the order of scheduling."""

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Scheduled actions, ordered by time. `now` only increases, and the simulation advances it."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._entries: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, act: Callable[..., object], *arguments: object) -> None:
        """Call `act(*arguments)` after `delay` seconds."""
        self._count += 1
        heapq.heappush(self._entries, (self.now + delay, self._count, act, arguments))

    def next_time(self) -> float | None:
        """Return the time of the next action."""
        return self._entries[0][0] if self._entries else None

    def run_due(self, most: int) -> None:
        """Run the actions that are due, at most `most`."""
        entries = self._entries
        while entries and entries[0][0] <= self.now and most:
            _, _, act, arguments = heapq.heappop(entries)
            act(*arguments)
            most -= 1
