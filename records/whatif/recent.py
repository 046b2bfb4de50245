"""The last minutes of a record, read in time also on a busy machine: the newest segments first."""

import time
from pathlib import Path

from records.reader import Segment, read
from records.whatif.arrivals import Recorded, WhatIfError, read_load
from records.whatif.load import Load

MAX_REQUESTS = 1000
MAX_OUTPUTS = 60_000
"""Most generated tokens of all requests together: three simulations of as many take 5 to 20 s of one core."""
_READING_SHARE = 0.4
"""Share of the time for reading the record."""


class OutOfTimeError(Exception):
    """A simulation takes too long."""


def read_recent(place: Path, since_s: float, ends_at: float) -> tuple[Recorded, bool]:
    """Read the newest segments that have enough requests and that there is time for; return whether these are all.

    Args:
        place: the record.
        since_s: requests that arrived earlier before the end of the record are in no figure, s.
        ends_at: monotonic time at which the caller gives up, s.

    Raises:
        WhatIfError: the record has no request, or no worker.
        UnreadableRecordError: a file is not a record.
        OSError: a file cannot be read.
    """
    segments = _recent(read(place), since_s)
    since = max(map(_written_at, segments), default=0.0) - since_s
    began = time.monotonic()
    count = 1
    while True:
        is_whole = count >= len(segments)
        try:
            recorded = read_load(segments[-count:], since)
        except WhatIfError:
            if is_whole:
                raise
            recorded = None
        # The next turn reads twice as many.
        is_late = 3 * (time.monotonic() - began) > _READING_SHARE * (ends_at - began)
        if recorded is not None and (is_whole or is_late or _is_enough(recorded.load)):
            return recorded, is_whole
        count *= 2


def _is_enough(load: Load) -> bool:
    arrivals = [each for each in load.arrivals if not each.left_out]
    return len(arrivals) > MAX_REQUESTS or sum(each.num_outputs for each in arrivals) > MAX_OUTPUTS


def _recent(segments: list[Segment], since_s: float) -> list[Segment]:
    """Return the segments that were written in the last `since_s` seconds of the record."""
    times = [_written_at(segment) for segment in segments]
    limit = max(times, default=0.0) - since_s
    return [segment for segment, written in zip(segments, times, strict=True) if written >= limit]


def _written_at(segment: Segment) -> float:
    """Return when a segment was last written; 0 if the recorder has deleted it meanwhile."""
    try:
        return segment.path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
