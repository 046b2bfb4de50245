"""Reads and simulates the last minutes of a record within a time limit, even on a busy machine.

The newest segments are read first. A few of the newest requests are simulated first. The time for this shows how many
more requests can be simulated.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from records.reader import Segment, read
from records.whatif.arrivals import Recorded, WhatIfError, read_load
from records.whatif.load import Arrival, Load
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from shared.errors import FieldViolation, InvalidRequestError

_DEFAULT_SINCE_S, _MAX_SINCE_S = 180.0, 900.0
MAX_REQUESTS = 1000
MAX_OUTPUTS = 60_000
"""Maximum total of generated tokens. Three simulations with this total take 5 to 20 s of CPU time."""
_FEW_OUTPUTS = 4_000
"""Total of generated tokens in the first, small simulation."""
_READING_SHARE = 0.4
"""Share of the time limit that may be spent reading the record."""
_SIMULATING_SHARE = 0.7
"""Fraction of the remaining time that the second simulation may take."""

Clock = Callable[[], float]
IsLate = Callable[[], bool]
_Result = TypeVar("_Result")


class OutOfTimeError(Exception):
    """A simulation takes too long."""


class LimitedScheduler(Scheduler):
    """A core that raises `OutOfTimeError` when it is asked for a plan after the time limit."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts, is_late: IsLate) -> None:
        super().__init__(config, incarnation, facts)
        self._is_late = is_late

    def plan(self, peer: Peer, now: float) -> tuple[Plan | None, list[Effect]]:
        if self._is_late():
            raise OutOfTimeError
        return super().plan(peer, now)


def seconds_of(since: Duration | None) -> float:
    """Return the selected period's length in seconds before the end of the record; a default for None.

    Raises:
        InvalidRequestError: the time is too short or too long.
    """
    seconds = _DEFAULT_SINCE_S if since is None else since.ToMilliseconds() / 1e3
    if not 0 < seconds <= _MAX_SINCE_S:
        raise InvalidRequestError(FieldViolation("since", f"must be more than 0 and at most {_MAX_SINCE_S:g} s"))
    return seconds


def newest(arrivals: Sequence[Arrival], max_outputs: float = MAX_OUTPUTS) -> list[Arrival]:
    """Return the newest requests within the limits, at least one. The first arrives at time 0."""
    found: list[Arrival] = []
    outputs = 0
    for each in reversed(arrivals):
        outputs += each.num_outputs
        if found and (outputs > max_outputs or len(found) == MAX_REQUESTS):
            break
        found.append(each)
    return [dataclasses.replace(each, at=each.at - found[-1].at) for each in reversed(found)]


def simulate_newest(
    arrivals: Sequence[Arrival],
    simulated: Callable[[list[Arrival], IsLate], _Result],
    ends_at: float,
    clock: Clock = time.monotonic,
) -> _Result:
    """Return the result for as many of the newest requests as there is time for, at least a few.

    Args:
        arrivals: the requests, oldest first.
        simulated: simulates requests; may raise `OutOfTimeError` if late.
        ends_at: time at which the caller stops waiting, s.
        clock: the clock to which `ends_at` refers.
    """
    few = newest(arrivals, _FEW_OUTPUTS)
    began = clock()
    first = simulated(few, lambda: clock() > float("inf"))
    now = clock()
    speed = sum(each.num_outputs for each in few) / max(now - began, 1e-9)
    more = newest(arrivals, min(MAX_OUTPUTS, speed * (ends_at - now) * _SIMULATING_SHARE))
    if len(more) <= len(few):
        return first
    limit = now + (ends_at - now) * (1 + _SIMULATING_SHARE) / 2
    with contextlib.suppress(OutOfTimeError):
        return simulated(more, lambda: clock() > limit)
    return first


def read_recent(place: Path, since_s: float, ends_at: float) -> tuple[Recorded, bool]:
    """Read the newest segments until there are enough requests or no time; return whether all segments were read.

    Args:
        place: the record.
        since_s: length of the selected period, s; requests that arrived earlier are excluded from the results.
        ends_at: monotonic time at which the caller stops waiting, s.

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
        # The next iteration reads twice as many segments.
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
    """Return when a segment was last written; 0 if the recorder has deleted the file meanwhile."""
    try:
        return segment.path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
