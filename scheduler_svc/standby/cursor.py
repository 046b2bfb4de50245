"""Cursor: the position of one standby in the leader's segments, and the decision what it gets next.

`Replica` is what the leader knows about the copy of a standby, and `Receipt` what the standby has received. The module
is pure. The bytes that a standby has not acknowledged are limited, so that neither side queues without
bound. A standby lags within the segments on the leader's disk. If the leader deletes a segment before the standby has
it, the standby starts over from the oldest segment.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

WINDOW_BYTES = 2 << 20
"""Maximum number of bytes that a standby has not acknowledged."""
PART_BYTES = 256 << 10
"""Maximum number of bytes in a part."""
TIMEOUT_S = 1.5
"""Silence of a standby, or delay of an acknowledgement, after which nothing waits for the standby, seconds."""

Extents = Mapping[int, int]
"""Sizes of the leader's segments in bytes, by number, oldest first."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes to send next."""

    segment: int
    offset: int
    num_bytes: int
    starts_over: bool
    is_complete: bool
    """Whether the standby then has the whole journal."""


@dataclass(slots=True)
class Cursor:
    """Position of a standby."""

    segment: int = 0
    """Segment of the next byte; 0 before the beginning."""
    offset: int = 0
    sent: int = 0
    """Number of bytes of this copy that were sent."""
    acknowledged: int = 0
    _end: int = 0
    """Size of the segment when it was last seen."""

    def next_part(self, extents: Extents) -> Part | None:
        """Return the next part, or None if there is nothing to send or the window is full. `extents` is not empty."""
        starts_over = self._must_start_over(extents)
        segment, offset = (next(iter(extents)), 0) if starts_over else (self.segment, self.offset)
        if not starts_over and offset == extents.get(segment, self._end) and segment + 1 in extents:
            segment, offset = segment + 1, 0
        size = extents[segment]
        unacknowledged = 0 if starts_over else self.sent - self.acknowledged
        num_bytes = min(size - offset, PART_BYTES, WINDOW_BYTES - unacknowledged)
        if num_bytes <= 0:
            return None
        is_complete = offset + num_bytes == size and segment + 1 not in extents
        return Part(segment, offset, num_bytes, starts_over, is_complete)

    def sent_part(self, part: Part, extents: Extents) -> None:
        """Advance behind a part that was sent."""
        if part.starts_over:
            self.sent = self.acknowledged = 0
        self.segment, self.offset = part.segment, part.offset + part.num_bytes
        self.sent += part.num_bytes
        self._end = extents[part.segment]

    def restart(self) -> None:
        """Send everything again, because a segment can no longer be read."""
        self.segment = 0

    def _must_start_over(self, extents: Extents) -> bool:
        if self.segment in extents:
            return False
        return not self.segment or self.offset < self._end or self.segment + 1 not in extents


@dataclass(slots=True)
class Replica:
    """What the leader knows about the copy of a standby."""

    cursor: Cursor = field(default_factory=Cursor)
    copy: int = 0
    """Number of the present copy, different for all copies. Acknowledgements of another copy are ignored."""
    replicated: int = -1
    """Journal position that the standby has; -1 while nothing waits for the standby."""
    _marks: deque[tuple[int, int, float]] = field(default_factory=deque)
    """(bytes to acknowledge, journal position that is then replicated, time sent), for parts that were complete."""

    def start_over(self, copy: int) -> None:
        """Begin another copy."""
        self.replicated, self.copy = -1, copy
        self._marks.clear()

    def position(self, part: Part) -> int:
        """Return the number of bytes in all earlier parts of the copy."""
        return 0 if part.starts_over else self.cursor.sent

    def sent(self, part: Part, extents: Extents, position: int, now: float) -> None:
        """Advance behind a part that was sent.

        Args:
            part: the part.
            extents: sizes of the segments when it was sent.
            position: journal position that the segments then had.
            now: time, seconds.
        """
        self.cursor.sent_part(part, extents)
        if part.is_complete:
            self._marks.append((self.cursor.sent, position, now))

    def acknowledge(self, num_bytes: int, copy: int, now: float) -> None:
        """Handle an acknowledgement of a number of bytes of a copy.

        A standby that nothing waits for must catch up first. Otherwise one that is always late would delay tokens again
        with each acknowledgement.
        """
        if copy != self.copy:
            return
        self.cursor.acknowledged = min(num_bytes, self.cursor.sent)
        position = -1
        while self._marks and self._marks[0][0] <= self.cursor.acknowledged:
            position = self._marks.popleft()[1]
        has_caught_up = not self._marks or now - self._marks[0][2] <= TIMEOUT_S
        if position >= 0 and (self.replicated >= 0 or has_caught_up):
            self.replicated = position

    def give_up(self, now: float) -> bool:
        """Wait for the standby no more if an acknowledgement is late; return whether this is new."""
        is_late = bool(self._marks) and now - self._marks[0][2] > TIMEOUT_S and self.replicated >= 0
        if is_late:
            self.replicated = -1
        return is_late


def replicated(replicas: Iterable[Replica]) -> float:
    """Return the journal position up to which every complete standby has a copy; infinite without such a standby.

    Any of these standbys may take over.
    """
    return min((each.replicated for each in replicas if each.replicated >= 0), default=math.inf)


@dataclass(slots=True)
class Receipt:
    """What a standby has received of the present copy."""

    num_bytes: int = 0
    copy: int = 0
    is_broken: bool = False
    """Whether a part is missing, so that the standby needs another copy."""

    def belongs(self, copy: int, *, starts_over: bool) -> bool:
        """Return whether a part belongs to the present copy, after the change to a copy that starts over."""
        if starts_over:
            self.num_bytes, self.copy, self.is_broken = 0, copy, False
        return copy == self.copy

    def follows(self, position: int) -> bool:
        """Return whether a part of the present copy follows the last one. The receipt is broken if it does not."""
        self.is_broken |= position != self.num_bytes
        return not self.is_broken
