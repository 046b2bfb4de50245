"""Processor time that other programs used during a run: all time in `/proc/stat`, less that of the own processes.

A load average is not suitable: it decays over minutes, so a command that ends shortly before the run looks like work
during the run.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_IDLE_FIELDS = (3, 4)
"""Fields of the line "cpu" that count no work: idle, and idle while waiting for a disk."""
_FIELDS = 8
"""Fields that add up to the time of the processors; later ones are parts of earlier ones."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Processor times at one moment, s."""

    wall_s: float
    busy_s: float
    """Of all processors together."""
    own_s: float
    """Of this process and of its children that have ended."""


def now(stat: Path = Path("/proc/stat")) -> Moment | None:
    """Return the present times; None where the system does not count them so."""
    try:
        line = stat.read_text("utf-8").splitlines()[0].split()
        counts = [int(each) for each in line[1 : 1 + _FIELDS]]
    except (OSError, ValueError, IndexError):
        return None
    busy = sum(count for index, count in enumerate(counts) if index not in _IDLE_FIELDS)
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    return Moment(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), own_s)


def share_of_others(before: Moment | None, after: Moment | None, processors: int) -> float | None:
    """Return the share of the processors' time that other programs used between two moments; None: not known.

    The own processes must have ended before the second moment.
    """
    if before is None or after is None or after.wall_s <= before.wall_s:
        return None
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / (processors * (after.wall_s - before.wall_s))
