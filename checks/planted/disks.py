"""Bugs with blocks on disk: fences, keys, scopes, failed and slow jobs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, both, with_bad_disk, with_disk, with_faults
from checks.sim.faults import Fault
from checks.sim.scenario import DiskShape, Scenario
from scheduler_svc.core.interface.disk import DiskAction
from scheduler_svc.core.memory import disk_space
from scheduler_svc.core.memory.disk_space import DiskSpace
from scheduler_svc.core.memory.host_keys import HostKeys
from scheduler_svc.core.memory.host_pool import HostPool

_DISK = adaptation("disk")
_BAD = adaptation("bad disk")


def _with_four_slots(scenario: Scenario) -> Scenario:
    """Let each written block evict one of few others."""
    workers = tuple(dataclasses.replace(size, num_disk_blocks=4) for size in scenario.workers)
    return dataclasses.replace(scenario, workers=workers)


def _with_slow_disk(scenario: Scenario) -> Scenario:
    """Let jobs take as long as several steps."""
    return dataclasses.replace(scenario, disk=DiskShape(block_s=scenario.pace.step))


def _with_hanging_disk(scenario: Scenario) -> Scenario:
    """Let reads hang, so that requests wait for them if nothing ends the wait."""
    step = scenario.pace.step
    pace = dataclasses.replace(scenario.pace, per_token=step / 4)
    return dataclasses.replace(scenario, pace=pace, disk=DiskShape(block_s=step / 10, hangs=0.1))


def _release_at_once(patch: pytest.MonkeyPatch, pool_of: Callable[[DiskSpace], HostPool], action: DiskAction) -> None:
    """Release the blocks of jobs in one pool as soon as they start, and not again when they end."""

    def start(start: Any, self: DiskSpace, kind: DiskAction, entries: Any, host_blocks: Any, slots: Any) -> None:
        start(self, kind, entries, host_blocks, slots)
        if kind is action:
            pool_of(self).release(slots if pool_of(self) is self.pool else host_blocks, last_step=0, answered_step=0)

    def held(release: Any, pool: HostPool, blocks: Any) -> None:
        release(pool, blocks[pool.references()[blocks] > 0])

    wrap(patch, DiskSpace, "_start", start)
    wrap(patch, disk_space, "_release", held)
    patch.setattr(HostPool, "validate", lambda self, tables: None)


@bug("disk.fence", "disk.content", "kv.reuse", aim=both(_DISK, _with_slow_disk))
def host_blocks_free_while_they_are_written(patch: pytest.MonkeyPatch) -> None:
    """A host block can be taken while a job writes it to disk."""
    _release_at_once(patch, lambda disk: disk._host, DiskAction.WRITE)


@bug("disk.fence", "disk.block", aim=both(_DISK, _with_four_slots, _with_slow_disk))
def slots_free_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    """A slot can be evicted and written while a job reads it."""
    _release_at_once(patch, lambda disk: disk.pool, DiskAction.READ)


@bug("kv.reuse", aim=_DISK)
def written_before_the_copy_to_the_host(patch: pytest.MonkeyPatch) -> None:
    """A block is written to disk although the step that copies it to host memory has no result."""
    patch.setattr(HostPool, "is_idle", lambda self, block: True)


@bug("kv.prefix", aim=_DISK)
def read_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a prefix are read into its host blocks in reverse order."""

    def reverse(send: Any, self: DiskSpace, action: DiskAction, host_blocks: Any, blocks: Any) -> None:
        send(self, action, host_blocks[::-1] if action is DiskAction.READ else host_blocks, blocks)

    wrap(patch, DiskSpace, "_send", reverse)


@bug("disk.key", aim=_DISK)
def written_without_a_scope(patch: pytest.MonkeyPatch) -> None:
    """The files of all cache scopes have the same scope."""
    wrap(patch, HostKeys, "entry", lambda entry, self, block: entry(self, block)._replace(root=bytes(32)))


@bug("disk.block", aim=_BAD)
def failed_writes_count_as_written(patch: pytest.MonkeyPatch) -> None:
    """A block that was not written is in the table of the disk."""

    def all_done(written: Any, self: DiskSpace, job: Any, done: Any, now: float) -> None:
        done[:] = True
        written(self, job, done, now)

    wrap(patch, DiskSpace, "_written", all_done)


@bug("kv.prefix", aim=_BAD)
def failed_reads_count_as_read(patch: pytest.MonkeyPatch) -> None:
    """A host block into which a file could not be read counts as read."""

    def all_done(read: Any, self: DiskSpace, job: Any, done: Any) -> None:
        done[:] = True
        read(self, job, done)

    wrap(patch, DiskSpace, "_read", all_done)


@bug("disk.block", aim=both(_BAD, with_faults(Fault.SPOILT_ROW, per_step=0.05)))
def cleared_blocks_are_read(patch: pytest.MonkeyPatch) -> None:
    """After the blocks on disk were deleted, they are still in the table."""

    def stale(_clear: Any, self: DiskSpace) -> None:
        self._send(DiskAction.CLEAR, (), ())

    wrap(patch, DiskSpace, "clear", stale)


@bug("work.waiting", "order.policy", "finish", aim=both(with_disk, _with_hanging_disk))
def requests_wait_for_a_disk_that_hangs(patch: pytest.MonkeyPatch) -> None:
    """A request waits for a read however long it takes."""
    patch.setattr(DiskSpace, "time_passed", lambda self, now: None)


@bug("kv.prefix", "disk.block", "disk.fence", aim=both(with_disk, with_bad_disk))
def late_reports_end_other_jobs(patch: pytest.MonkeyPatch) -> None:
    """A repeated report ends the oldest job that is under way."""

    def oldest(reported: Any, self: DiskSpace, copy_id: int, failed: Any, now: float) -> int:
        num_read: int = reported(self, min(self._jobs, default=copy_id), failed, now)
        return num_read

    wrap(patch, DiskSpace, "reported", oldest)
