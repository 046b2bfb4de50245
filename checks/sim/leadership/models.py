"""Models for the simulation of leases: the store, the processes, a journal, its copies, and workers.

A stream has one long list of tokens. A token knows the token after which it was computed, so that the simulation finds
a stream that continues after other tokens than the client has.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.standby import tenure
from scheduler_svc.standby.cursor import Part, Receipt, Replica
from scheduler_svc.standby.leader_number import Numbers
from scheduler_svc.standby.tenure import Tenure
from shared.schedulers import Schedulers

DURATION_S = 2.0
RECORD_BYTES = 64 << 10
"""Size of a record in the journal. It is large, so that few tokens fill the window of a standby."""
_SEGMENT_RECORDS = 10
_MAX_SEGMENTS = 4


class Token(NamedTuple):
    """A token that a worker computed."""

    number: int
    """Different for every token of a simulation."""
    parent: int
    """Number of the token before it; 0 for none."""


Tokens = list[Token]


class Record(NamedTuple):
    """Record of the journal: the tokens from a position on."""

    position: int
    tokens: tuple[Token, ...]


class Session(NamedTuple):
    """Connection to a scheduler that leads. Messages of an earlier session have no effect."""

    process: int
    number: int
    connections: tuple[int, int]
    """Connection numbers of both ends."""


NO_SESSION = Session(-1, -1, (-1, -1))


@dataclass(slots=True)
class Store:
    """Model of the store."""

    rate: float
    """Speed of its clock."""
    lease: int = 0
    """Id of the lease that is held; 0 for none."""
    holder: int = -1
    ends_at: float = 0.0
    number: int = 0
    leases: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def expire(self, now: float) -> None:
        if self.lease and now >= self.ends_at:
            self.lease, self.holder = 0, -1

    def acquire(self, holder: int, highest: int, now: float) -> tuple[int, int]:
        """Return (number, lease) of the new holder, or (0, 0)."""
        self.expire(now)
        if self.lease:
            return 0, 0
        self.number = tenure.next_number(self.number, highest, 1 + int(1000 * now))
        self.lease, self.holder = next(self.leases), holder
        self.ends_at = now + DURATION_S / self.rate
        return self.number, self.lease

    def renew(self, lease: int, now: float) -> bool:
        self.expire(now)
        if lease != self.lease:
            return False
        self.ends_at = now + DURATION_S / self.rate
        return True

    def revoke(self, lease: int, now: float) -> int:
        """End a lease by its id; return the holder whose lease was ended, or -1."""
        self.expire(now)
        if lease != self.lease:
            return -1
        holder, self.lease, self.holder = self.holder, 0, -1
        return holder


class Journal:
    """Journal of a leader. It deletes old segments, and begins each segment with all tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._segments: dict[int, list[Record]] = {}
        self.written = 0
        """Number of bytes written so far."""
        self._tokens = tokens
        self._begin()

    @property
    def extents(self) -> dict[int, int]:
        return {number: len(records) * RECORD_BYTES for number, records in self._segments.items()}

    def append(self, position: int, tokens: Sequence[Token]) -> None:
        """Write tokens that the list of all tokens contains already."""
        newest = self._segments[max(self._segments)]
        if len(newest) >= _SEGMENT_RECORDS:
            self._begin()
        else:
            self._write(newest, Record(position, tuple(tokens)))

    def rewrite(self, tokens: Tokens) -> None:
        """Replace all tokens by others."""
        self._tokens = tokens
        self.append(0, tokens)

    def read(self, part: Part) -> list[Record]:
        first = part.offset // RECORD_BYTES
        return self._segments[part.segment][first : first + part.num_bytes // RECORD_BYTES]

    def _begin(self) -> None:
        records = self._segments[1 + max(self._segments, default=0)] = []
        self._write(records, Record(0, tuple(self._tokens)))
        while len(self._segments) > _MAX_SEGMENTS:
            del self._segments[min(self._segments)]

    def _write(self, records: list[Record], record: Record) -> None:
        records.append(record)
        self.written += RECORD_BYTES


@dataclass(slots=True)
class Copy:
    """Folder of a standby: a model of `scheduler_svc.standby.mirror`."""

    tokens: Tokens = field(default_factory=list)
    """What the folder contains."""
    is_complete: bool = False
    number: int = 0
    """Leader number of the journal that is copied."""
    receipt: Receipt = field(default_factory=Receipt)
    _incoming: Tokens = field(default_factory=list)
    _place: tuple[int, int] = (0, 0)

    def restart(self) -> None:
        """Keep only the folder, as after a restart of the process."""
        self.is_complete, self.number, self.receipt, self._place = False, 0, Receipt(), (0, 0)

    def write(self, part: Part, records: Sequence[Record]) -> bool:
        """Write a part; return False if it does not follow the last one."""
        if part.starts_over:
            self.is_complete, self._incoming, self._place = False, [], (part.segment, 0)
        if part.segment != self._place[0] and not part.offset:
            self._place = part.segment, 0
        if (part.segment, part.offset) != self._place:
            return False
        tokens = self.tokens if self.is_complete else self._incoming
        for record in records:
            tokens[record.position :] = record.tokens
        self._place = part.segment, part.offset + part.num_bytes
        if part.is_complete and not self.is_complete:
            self.tokens, self._incoming, self.is_complete = self._incoming, [], True
        return True


@dataclass(slots=True)
class Node:
    """A process that faults may kill or stop."""

    index: int
    generation: int = 0
    """Increases when the process is killed; events of earlier generations have no effect."""
    is_stopped: bool = False
    is_dead: bool = False
    connection: int = 0
    """Number of connections so far. A network cut breaks them; messages of one connection arrive in order."""
    held_back: list[tuple[bool, Callable[[], object]]] = field(default_factory=list)
    """Actions for the time after SIGSTOP, each with whether it is a turn of the loop. Turns come after all messages."""
    num_faults: int = 0
    """Number of present faults of this process."""
    undisturbed_since: float = 0.0
    """Time at which the last fault of this process ended; infinite during a fault."""
    calm_s: float = 0.0
    """Time without a fault before the present one."""


@dataclass(slots=True)
class Plan:
    """A step for the stream."""

    attempt: int
    position: int
    kept: int
    """Number of tokens whose KV the worker has."""
    tokens: tuple[Token, ...]
    """Tokens whose KV is computed first."""


@dataclass(slots=True)
class Worker(Node):
    """A worker. It retains the KV of its row when it loses its scheduler."""

    schedulers: Schedulers = field(default_factory=lambda: Schedulers("tcp://0:1"))
    session: Session = NO_SESSION
    row: Tokens = field(default_factory=list)
    """Tokens whose KV it has."""
    running: tuple[Session, Plan] | None = None
    waiting: deque[tuple[Session, Plan]] = field(default_factory=deque)


@dataclass(slots=True)
class Lead:
    """State of a scheduler while it leads."""

    journal: Journal
    log: Tokens
    """Tokens of the stream."""
    replicas: dict[int, Replica] = field(default_factory=dict)
    """Standbys by index."""
    heard_at: dict[int, float] = field(default_factory=dict)
    submission: Session = NO_SESSION
    """Session in which the front end submitted the stream."""
    sent: int = 0
    """Number of tokens that the front end has or was sent."""
    positions: list[int] = field(default_factory=list)
    """Journal position of each token of the log."""
    times: list[float] = field(default_factory=list)
    """Time at which the leader received each token of the log."""
    attempt: int = 0
    workers: dict[int, tuple[Session, Tokens]] = field(default_factory=dict)
    """By connected worker: its session with the scheduler, and the tokens of its row."""
    assigned: int = -1
    plan: Plan | None = None
    """The step in flight."""
    ticked_at: float = -math.inf
    since: float = 0.0
    is_promised: bool = False
    """Whether it must know all tokens that were delivered, because it had the whole journal of the last leader."""


@dataclass(slots=True)
class Process(Node):
    """A scheduler's process."""

    rate: float = 1.0
    offset: float = 0.0
    tenure: Tenure = field(default_factory=lambda: Tenure(DURATION_S))
    lease: int = 0
    numbers: Numbers = field(default_factory=Numbers)
    reaches_store: bool = True
    reaches_others: bool = True
    lead: Lead | None = None
    copy: Copy = field(default_factory=Copy)
    leader: int = -1
    """Scheduler that it follows; -1 for none."""
    heard_at: float = 0.0
    """Time of the last message of a leader, on its own clock."""
    slow_s: float = 0.0
    """Time that it takes to write a part."""
    parts: deque[Callable[[], None]] = field(default_factory=deque)
    """Parts that it has to write."""
    standing: int | None = None
    """Highest leader number known to the process while it tries to acquire the lease; otherwise None."""

    def clock(self, now: float) -> float:
        return now * self.rate + self.offset


def common_length(one: Tokens, other: Tokens) -> int:
    """Return the number of tokens at the beginning that are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
