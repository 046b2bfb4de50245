"""Grammars that a worker has compiled or cannot compile.

A request with a grammar is planned only on a worker that has reported the grammar as compiled. The scheduler decides
which compiled grammars a worker retains: `make_room` returns the grammars to drop. Scheduler and worker therefore
always agree, and a grammar that a running row uses is never dropped.

A grammar goes through these states, on each worker and in each epoch separately:

    unknown --ask--> asked --reported--> ready --make_room--> unknown
                       |
                       +----reported---> failed --(many others failed since)--> unknown
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_svc.core.interface.records import GrammarFailure
from shared.frames import MAX_GRAMMARS

MAX_ASKED = 8
"""Maximum number of grammars that a worker compiles at a time; the backlog keeps the order of the others."""
MAX_FAILED = 1024
"""Maximum number of grammars stored as failed. The oldest is dropped, and may then be tried again."""


@dataclass(slots=True)
class Grammars:
    """One worker's grammars in one epoch, by key. An empty key means no grammar, which is always ready."""

    _users: dict[bytes, int] = field(default_factory=dict)
    """Grammars that rows use, with the number of these rows."""
    _unused: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Other ready grammars, least recently used first; with `_asked` at most MAX_GRAMMARS after `make_room`."""
    _asked: set[bytes] = field(default_factory=set)
    """Grammars being compiled, at most MAX_ASKED."""
    _failed: OrderedDict[bytes, GrammarFailure] = field(default_factory=OrderedDict)
    """Failed grammars, oldest first; at most MAX_FAILED."""

    def is_ready(self, key: bytes) -> bool:
        """Return whether a request with this grammar may be planned, and mark the grammar as recently used."""
        if not key or key in self._users:
            return True
        if key in self._unused:
            self._unused.move_to_end(key)
            return True
        return False

    def is_failed(self, key: bytes) -> bool:
        """Return whether the worker has reported that it cannot compile this grammar."""
        return key in self._failed

    def failure(self, key: bytes) -> GrammarFailure | None:
        """Return the reason why the worker cannot compile this grammar, or None."""
        return self._failed.get(key)

    def failed(self) -> Iterator[bytes]:
        """Iterate over the grammars that the worker cannot compile."""
        return iter(list(self._failed))

    def is_known(self, key: bytes) -> bool:
        """Return whether the worker has the grammar, was asked for it, or cannot compile it."""
        return key in self._asked or key in self._failed or key in self._users or key in self._unused

    def ask(self, key: bytes) -> bool:
        """Record that the grammar is needed; return whether to send it to the worker.

        False means that the worker is already compiling the grammar, cannot compile it, or is compiling MAX_ASKED
        others. In the last case, the caller must ask again after one of them was reported.
        """
        if key in self._asked or key in self._failed or len(self._asked) >= MAX_ASKED:
            return False
        self._asked.add(key)
        return True

    def make_room(self) -> tuple[bytes, ...]:
        """Drop the least recently used grammars beyond MAX_GRAMMARS; return their keys for the worker to drop."""
        num_excess = len(self._unused) + len(self._asked) - MAX_GRAMMARS
        return tuple(self._unused.popitem(last=False)[0] for _ in range(min(num_excess, len(self._unused))))

    def reported(self, key: bytes, failure: GrammarFailure | None = None) -> bool:
        """Record the worker's report. If the worker was not asked, ignore the report and return False."""
        if key not in self._asked:
            return False
        self._asked.remove(key)
        if failure is None:
            self._unused[key] = None
        else:
            self._failed[key] = failure
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
        return True

    def occupied(self, key: bytes) -> None:
        """Record that a request with this grammar was given a row."""
        if key:
            self._unused.pop(key, None)
            self._users[key] = self._users.get(key, 0) + 1

    def vacated(self, key: bytes) -> None:
        """Record that a request with this grammar has left its row."""
        if not key:
            return
        num_users = self._users[key] - 1
        if num_users:
            self._users[key] = num_users
        else:
            del self._users[key]
            self._unused[key] = None

    def validate(self, used: dict[bytes, int]) -> None:
        """Check the invariants; `used` is each grammar's number of rows."""
        assert self._users == used, "grammars and rows disagree"
        assert len(self._asked) <= MAX_ASKED
        assert len(self._failed) <= MAX_FAILED
        states = (self._users.keys(), self._unused.keys(), self._asked, self._failed.keys())
        assert len(set().union(*states)) == sum(map(len, states)), "a grammar is in two states"
