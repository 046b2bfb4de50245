"""Time, events and the network of the simulation of leases."""

import heapq
import itertools
import random
from collections.abc import Callable

from checks.sim.leadership.models import Node, Process


class BrokenPromiseError(AssertionError):
    """A promise was broken; the message names it."""


class Events:
    """Events in the order of time, and messages between processes.

    Args:
        seed: determines everything.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._arrivals: dict[tuple[int, int], float] = {}
        """Arrival time of the last message by sender and receiver."""

    def run(self, end_s: float) -> None:
        """Run all events until a time."""
        while self._events and self._events[0][0] < end_s:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def later(self, delay: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def delay(self) -> float:
        """Return the time that a message takes, seconds."""
        return self.rng.choice([0.001, 0.01, 0.1]) * self.rng.random()

    def do(self, node: Node, delay: float, what: Callable[[], object], *, is_turn: bool = False) -> None:
        """Let a process do something later, unless it was killed; when it is stopped, it does so when it continues."""
        generation = node.generation

        def event() -> None:
            if node.generation != generation or node.is_dead:
                return
            if node.is_stopped:
                node.held_back.append((is_turn, event))
            else:
                what()

        self.later(delay, event)

    def transmit(self, sender: Node, receiver: Node, what: Callable[[], object]) -> None:
        """Let the receiver handle a message, after all earlier ones. A broken connection loses messages."""
        if not (_is_reachable(sender) and _is_reachable(receiver)):
            return
        link, connections = (sender.index, receiver.index), (sender.connection, receiver.connection)
        arrives_at = max(self._arrivals.get(link, 0.0), self.now + self.delay())
        self._arrivals[link] = arrives_at

        def arrive() -> None:
            if (sender.connection, receiver.connection) == connections:
                self.do(receiver, 0.0, what)

        self.later(arrives_at - self.now, arrive)

    def resume(self, node: Node) -> None:
        """Let a stopped process continue. It reads all messages before its next turn."""
        node.is_stopped = False
        held_back, node.held_back = sorted(node.held_back, key=lambda each: each[0]), []
        for _, event in held_back:
            self.later(0.0, event)


def _is_reachable(node: Node) -> bool:
    return not isinstance(node, Process) or node.reaches_others
