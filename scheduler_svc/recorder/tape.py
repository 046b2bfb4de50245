"""Tape: the calls of a core in order, with all facts about token ids.

`RecordedScheduler` is a core with a tape. Recording only appends references. Events, plans and effects are never
modified, so another thread can encode them later.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.events import Event
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Notes, Peer, QueueNote, RequestLine
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import BlockKey


@dataclass(slots=True)
class Facts:
    """Facts about token ids that the core used during a call."""

    keys: bytes = b""
    """Block keys, joined: as computed in a tape, as tags in a record."""
    partial: Sequence[PartialMatch | None] = ()
    stopped: Sequence[int] = ()
    held: Sequence[int] = ()
    """For each rare condition that was true, the number of failed checks since the previous true condition."""


class Handled(NamedTuple):
    """A call of `handle`."""

    event: Event
    now: float
    effects: list[Effect]
    facts: Facts | None
    timings: plan_pb2.StepTimings | None
    notes: Sequence[RequestLine | QueueNote]
    """New lines of requests' histories."""


class Planned(NamedTuple):
    """A call of `plan`."""

    peer: Peer
    now: float
    plan: Plan | None
    effects: list[Effect]
    facts: Facts | None
    notes: Sequence[RequestLine | QueueNote]


class Reported(NamedTuple):
    """A front end's report."""

    frontend: Peer
    report: link_pb2.RequestReport
    now: float


class Stray(NamedTuple):
    """Facts from outside a call: the core did deferred work before it returned its state."""

    facts: Facts
    now: float


class Cut(NamedTuple):
    """A new segment begins here."""

    now: float
    pid: int
    """Process that writes the core's state; 0 for none."""
    pipe: int
    """File descriptor from which to read the state; -1 for none."""


Item = Handled | Planned | Reported | Stray


class FactsTaken(TokenFacts):
    """Token facts that are also recorded."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._partial: list[PartialMatch | None] = []
        self._stopped: list[int] = []
        self._held: list[int] = []
        self._num_false = 0
        self._any = False

    def following_keys(self, parent: BlockKey, tokens: bytes, block_size: int) -> bytes:
        keys = super().following_keys(parent, tokens, block_size)
        self._keys.append(keys)
        self._any = True
        return keys

    def partial(self, match: PartialMatch | None) -> PartialMatch | None:
        self._partial.append(match)
        self._any = True
        return match

    def stopped(self, positions: IndexArray) -> IndexArray:
        if len(positions):
            self._stopped += positions.tolist()
            self._any = True
        return positions

    def holds(self, condition: bool) -> bool:
        if condition:
            self._held.append(self._num_false)
            self._num_false = 0
            self._any = True
        else:
            self._num_false += 1
        return condition

    def take(self) -> Facts | None:
        """Return the facts since the last call; None if there are none."""
        if not self._any:
            return None
        facts = Facts(b"".join(self._keys), self._partial, self._stopped, self._held)
        self._keys, self._partial, self._stopped, self._held, self._any = [], [], [], [], False
        return facts

    def cut(self) -> None:
        """Start counting from zero, because each segment is read separately."""
        self._num_false = 0


class Tape:
    """The calls of one core that have not been written yet."""

    def __init__(self) -> None:
        self.facts = FactsTaken()
        self.notes: Notes = []
        # Append and pop are atomic, so another thread may take items concurrently.
        self.items: deque[Item | Cut] = deque()
        self.timings: plan_pb2.StepTimings | None = None
        """Timings of the step whose result the core gets next."""
        self.is_off = False
        """Whether nothing is recorded any more."""

    def append(self, item: Item) -> None:
        """Append a call or a report."""
        if not self.is_off:
            self.items.append(item)

    def handled(self, event: Event, now: float, effects: list[Effect]) -> None:
        """Append a call of `handle`."""
        self.append(Handled(event, now, effects, self.facts.take(), self.timings, self._take_notes()))
        self.timings = None

    def planned(self, peer: Peer, now: float, plan: Plan | None, effects: list[Effect]) -> None:
        """Append a call of `plan`."""
        self.append(Planned(peer, now, plan, effects, self.facts.take(), self._take_notes()))

    def _take_notes(self) -> Sequence[RequestLine | QueueNote]:
        if not self.notes:
            return ()
        notes = self.notes.copy()
        self.notes.clear()
        return notes

    def cut(self, now: float, pid: int = 0, pipe: int = -1) -> None:
        """Begin a segment."""
        stray = self.facts.take()
        if stray is not None:
            self.append(Stray(stray, now))
        self.facts.cut()
        if not self.is_off:
            self.items.append(Cut(now, pid, pipe))


class RecordedScheduler(Scheduler):
    """The core with a tape of its calls. Failed calls are also on the tape."""

    def __init__(self, config: CoreConfig, incarnation: int, tape: Tape) -> None:
        super().__init__(config, incarnation, tape.facts, tape.notes)
        self._tape = tape

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        try:
            effects = super().handle(event, now)
        finally:
            self._tape.handled(event, now, effects)
        return effects

    def _plan_due(self, worker: Worker, now: float) -> tuple[Plan | None, list[Effect]]:
        plan: Plan | None = None
        effects: list[Effect] = []
        try:
            plan, effects = super()._plan_due(worker, now)
        finally:
            self._tape.planned(worker.peer, now, plan, effects)
        return plan, effects
