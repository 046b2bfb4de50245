"""The disk of a simulated worker: how long jobs take, and in which order they run.

Like a worker's thread, it runs one job at a time, reads first and other jobs in order. A worker on a CPU handles
messages only between steps, so a job that is ordered during a step starts after the step, and a report waits for the
end of a step, too. The content of files is not simulated: a read always succeeds. The disk is empty when the worker
joins.

The times are learned from the jobs in a record. Without any, a disk of 3 GB/s is assumed.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.core.interface.disk import DiskAction, DiskJob

ASSUMED_BYTES_PER_S = 3e9
"""Bandwidth of a disk that was not measured."""
ASSUMED_LATENCY_S = 100e-6
"""Latency of a disk that was not measured."""


class DiskSample(NamedTuple):
    """A completed job; times in seconds."""

    reads: bool
    num_blocks: int
    seconds: float
    """Duration of the job itself."""
    total_s: float
    """From the order to the report."""
    waited: bool
    """Whether the job or its report may have waited for other jobs or steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTimes:
    """How long the jobs of a disk take; seconds."""

    read_s: float
    """Per block that is read."""
    write_s: float
    """Per block that is written."""
    latency_s: float = 0.0
    """Per job, from its order to its start and from its end to its report, without waiting for jobs and steps."""

    def seconds(self, job: DiskJob) -> float:
        """Return the duration of a job."""
        return len(job.blocks) * (self.read_s if job.action is DiskAction.READ else self.write_s)


def assumed(block_bytes: int) -> DiskTimes:
    """Return the times of a disk that was not measured, for blocks of so many bytes."""
    block_s = block_bytes / ASSUMED_BYTES_PER_S
    return DiskTimes(read_s=block_s, write_s=block_s, latency_s=ASSUMED_LATENCY_S)


def learn(samples: Iterable[DiskSample]) -> DiskTimes | None:
    """Return the times of the disk in a record; None without jobs.

    If nothing was read, a read is assumed to take as long as a write, and the reverse.
    """
    found = [each for each in samples if each.num_blocks and each.seconds > 0]
    if not found:
        return None
    block_s = {}
    for reads in (True, False):
        of_kind = [each for each in found if each.reads is reads] or found
        block_s[reads] = sum(each.seconds for each in of_kind) / sum(each.num_blocks for each in of_kind)
    delays = sorted(max(0.0, each.total_s - each.seconds) for each in found if not each.waited)
    latency_s = delays[len(delays) // 2] if delays else 0.0
    return DiskTimes(read_s=block_s[True], write_s=block_s[False], latency_s=latency_s)


class StepClock:
    """The steps of a worker that handles messages only between steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        """Begin and end of each step, in order."""

    def add(self, begin: float, end: float) -> None:
        """Add a step that begins after all earlier ones."""
        self._steps.append((begin, end))

    def boundary(self, now: float) -> float:
        """Return the end of the step in progress; `now` if there is none."""
        while self._steps and self._steps[0][1] <= now:
            self._steps.popleft()
        return self._steps[0][1] if self._steps and self._steps[0][0] <= now else now


class SimulatedDisk:
    """The jobs of one worker's disk. The caller runs the clock.

    `start` returns the next job if the disk is idle. When the job has ended, the caller calls `ended`, then `start`.
    """

    def __init__(self, times: DiskTimes) -> None:
        self._times = times
        self.latency_s = times.latency_s
        """From the end of a job to its report, including the time from the order to the start, s."""
        self._reads: deque[DiskJob] = deque()
        self._others: deque[DiskJob] = deque()
        self._is_busy = False

    def order(self, job: DiskJob) -> None:
        """Queue a job."""
        (self._reads if job.action is DiskAction.READ else self._others).append(job)

    def start(self) -> tuple[DiskJob, float] | None:
        """Start the next job if the disk is idle; return the job and its duration in s, or None."""
        if self._is_busy or not (self._reads or self._others):
            return None
        self._is_busy = True
        job = (self._reads or self._others).popleft()
        return job, self._times.seconds(job)

    def ended(self) -> None:
        """Make the disk idle, because its job has ended."""
        self._is_busy = False
