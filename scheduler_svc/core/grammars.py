"""Which grammars a worker has compiled: a request with one is planned only there, and only then.

A worker compiles off the way of its steps, when it is first asked for, and reports. What it has compiled it may forget
again; an admission carries the grammar, so that this costs it time and nothing else.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_READY = 4096
"""Grammars that are remembered as compiled; those used longest ago are asked for again."""


@dataclass(slots=True)
class Grammars:
    """The grammars of one worker in one epoch, by key."""

    _ready: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _asked: set[bytes] = field(default_factory=set)

    def is_ready(self, key: bytes) -> bool:
        """Whether a request with this grammar (none: an empty key) may be planned."""
        if not key:
            return True
        if key in self._ready:
            self._ready.move_to_end(key)
            return True
        return False

    def ask(self, key: bytes) -> bool:
        """Notes that the grammar is wanted; whether the worker is to be asked for it."""
        if key in self._asked:
            return False
        self._asked.add(key)
        return True

    def reported(self, key: bytes, *, usable: bool) -> bool:
        """The worker's answer; False when nobody asked."""
        if key not in self._asked:
            return False
        self._asked.remove(key)
        if usable:
            self._ready[key] = None
            if len(self._ready) > MAX_READY:
                self._ready.popitem(last=False)
        return True
