"""Cursor: the position of one standby in the leader's segments, and the decision what it gets next.

The module is pure. The bytes that a standby has not acknowledged are limited, so that neither side queues without
bound. A standby lags within the segments on the leader's disk. If the leader deletes a segment before the standby has
it, the standby starts over from the oldest segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_BYTES = 2 << 20
"""Maximum number of bytes that a standby has not acknowledged."""
PART_BYTES = 256 << 10
"""Maximum number of bytes in a part."""

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
