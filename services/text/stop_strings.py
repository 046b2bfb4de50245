"""Finds stop strings in text that arrives in pieces, and never releases a part of a stop string.

An Aho-Corasick automaton over all stop strings reads each character once. Its state's depth is the length of the
longest suffix that may still become a stop string. This suffix is held back. The match that ends first wins. If several
matches end at the same position, the longest wins. The result does not depend on the boundaries between pieces.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A found stop string."""

    stop_string: str
    start: int
    """Index of its first character in the whole text."""


class StopAutomaton:
    """Aho-Corasick automaton for a set of stop strings, built once per stream."""

    __slots__ = ("depth", "fail", "found", "goto")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        """Longest stop string that ends in each state, or None, by state."""
        for stop_string in stop_strings:
            self._insert(stop_string)
        self.fail = [0] * len(self.goto)
        self._link()

    def _insert(self, stop_string: str) -> None:
        state = 0
        for character in stop_string:
            if character not in self.goto[state]:
                self.goto[state][character] = len(self.goto)
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.goto[state][character]
        self.found[state] = stop_string

    def _link(self) -> None:
        """Compute failure links breadth first, so that shorter suffixes are linked first."""
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.goto[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                self.found[child] = self.found[child] or self.found[self.fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while True:
            after = self.goto[state].get(character)
            if after is not None:
                return after
            if state == 0:
                return 0
            state = self.fail[state]


class StopFinder:
    """Search state of one stream."""

    __slots__ = ("_automaton", "_held", "_keep", "_length", "_state", "match")

    def __init__(self, stop_strings: Sequence[str], *, keep: bool = False) -> None:
        """Create the finder; `keep` retains the matched stop string in the text."""
        self._keep = keep
        self._automaton = StopAutomaton(stop_strings)
        self._state = 0
        self._held = ""
        self._length = 0
        self.match: Match | None = None
        """The match; set once. Later text is dropped."""

    @property
    def released(self) -> int:
        """Number of characters released so far."""
        return self._length - len(self._held)

    def push(self, text: str) -> str:
        """Return the text that can be released after `text` has arrived."""
        if self.match is not None:
            return ""
        automaton, state = self._automaton, self._state
        for position, character in enumerate(text):
            state = automaton.step(state, character)
            stop_string = automaton.found[state]
            if stop_string is not None:
                return self._matched(stop_string, text[: position + 1])
        pending = self._held + text
        cut = len(pending) - automaton.depth[state]
        self._state, self._held = state, pending[cut:]
        self._length += len(text)
        return pending[:cut]

    def skip(self, text: str) -> None:
        """Count text that is released without search; only valid before the first `push`."""
        self._length += len(text)

    def finish(self) -> str:
        """Return the text that was held back until the end of the output."""
        held, self._held = self._held, ""
        return held

    def _matched(self, stop_string: str, text: str) -> str:
        pending = self._held + text
        kept = len(pending) - len(stop_string)
        start = self._length - len(self._held) + kept
        self.match = Match(stop_string, start)
        if self._keep:
            kept = len(pending)
        self._held, self._length = "", self._length - len(self._held) + kept
        return pending[:kept]
