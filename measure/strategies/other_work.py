"""CPU time that other programs used during a run: all CPU time in `/proc/stat` minus that of the benchmark's processes.

A load average is not suitable: it decays over minutes, so a command that ends shortly before the run looks like work
during the run.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_IDLE_FIELDS = (3, 4)
"""Fields in the line "cpu" that count idle time: idle, and waiting for a disk."""
_FIELDS = 8
"""Fields that add up to the total CPU time. Later fields repeat parts of these."""


@dataclass(frozen=True, slots=True)
class Moment:
    """CPU times at one timestamp, in seconds."""

    wall_s: float
    busy_s: float
    """Busy time of all CPUs together."""
    own_s: float
    """Time used by this process and its children that have exited."""


def now(stat: Path = Path("/proc/stat")) -> Moment | None:
    """Return the current CPU times; None if the system does not report them."""
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
    """Return the fraction of CPU time used by other programs between two timestamps; None if unknown.

    The benchmark's processes must have exited before the second timestamp.
    """
    if before is None or after is None or after.wall_s <= before.wall_s:
        return None
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others) / (processors * (after.wall_s - before.wall_s))
