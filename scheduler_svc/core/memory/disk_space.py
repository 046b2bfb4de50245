"""Disk of one worker, for cached blocks that leave host memory.

A *slot* holds one block. The worker copies between host memory and slots by *jobs*, concurrently with steps and outside
plans, and reports the end of each job. Until then, the job holds its host blocks and its slots, so that neither is used
for anything else.

* Blocks that move to host memory are then written to disk too. When host memory evicts them, they are still on disk,
  also for a restarted worker. If the disk is slower than blocks arrive, some are not written.
* When a request continues with blocks that are on disk, they are read to host memory, from the front, and the request
  waits for them. From host memory they are copied to the device like any other block (`host_copies`). A request waits
  at most as long as it would take to compute the tokens.

The least recently used slots are evicted. After a failed write, no block is written for a while. A failed read removes
the block from the table, so that its tokens are computed.
"""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, BoolArray, IndexArray, where
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from scheduler_svc.core.memory.host_keys import BlockEntry, HostKeys
from scheduler_svc.core.memory.host_pool import HostPool
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from shared.prefix_keys import BlockKey

_JOB_BLOCKS = 16
"""Maximum number of blocks in one job. Requests wait for the first of them."""
_MAX_WRITING = 4 * _JOB_BLOCKS
"""Maximum number of blocks that are being written."""
_WRITING_PART, _READING_PART = 8, 2
"""Writes hold at most one host block in this many, and so do reads."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed write. It doubles with every further failure."""
_MAX_REASONS = 16
"""Maximum number of reasons for refused files that are counted."""


@dataclass(slots=True)
class _Job:
    """A job without a report."""

    action: DiskAction
    entries: list[BlockEntry]
    host_blocks: IndexArray
    slots: IndexArray
    is_void: bool = False
    """Whether its blocks are dropped afterwards, because their KV may be wrong."""


class DiskSpace:
    """The slots of one worker in one epoch."""

    def __init__(
        self, num_slots: int, host: HostPool, directory: PrefixDirectory | None = None, epoch: int = 0
    ) -> None:
        """Make a space without known content, which takes no jobs until the worker has listed its slots.

        Args:
            num_slots: number of slots.
            host: the host blocks.
            directory: gets the keys of blocks that begin a sequence, under `epoch`.
            epoch: the worker's epoch.
        """
        self.keys = HostKeys(num_slots, directory, epoch)
        self.pool = HostPool(num_slots, self.keys)
        self.is_ready = False
        """Whether the worker has listed its slots."""
        self.outbox: list[DiskJob] = []
        """Jobs that the worker has not got yet. The caller sends and removes them."""
        self.written_blocks = 0
        self.read_blocks = 0
        self.refused: Counter[str] = Counter()
        """Number of files that the worker has refused, by reason."""
        self._host = host
        host.keys.other, self.keys.other = self.keys, host.keys
        self._jobs: dict[int, _Job] = {}
        self._next_id = 1
        self._unwritten: deque[BlockKey] = deque(maxlen=max(1, host.num_blocks))
        """Keys of blocks that have moved to host memory and may not be on disk, oldest first."""
        self._writing: set[BlockKey] = set()
        self._reading: set[BlockKey] = set()
        self._awaited: dict[BlockKey, float] = {}
        """The blocks that are being read and that requests may wait for, with the time until which they may."""
        self._ignores_list = False
        """Whether blocks that the worker lists are ignored, because they were cleared in the meantime."""
        self._has_files = False
        """Whether the worker may have files."""
        self._pause_s = 0.0
        self._paused_until = 0.0

    @property
    def num_reading(self) -> int:
        """Number of blocks that are being read."""
        return len(self._reading)

    @property
    def num_host_blocks(self) -> int:
        """Number of host blocks that jobs hold."""
        return sum(len(job.host_blocks) for job in self._jobs.values())

    @property
    def _write_room(self) -> int:
        return min(_MAX_WRITING, max(1, self._host.num_blocks // _WRITING_PART)) - len(self._writing)

    def is_awaited(self, key: BlockKey) -> bool:
        """Return whether a block is being read and a request should wait for it."""
        return key in self._awaited

    def time_passed(self, now: float) -> None:
        """Let requests compute the blocks whose reads take too long."""
        if self._awaited:
            self._awaited = {key: until for key, until in self._awaited.items() if now < until}

    def match(self, keys: bytes, start: int) -> IndexArray:
        """Return the slots that continue a sequence after its first `start` blocks; `keys`: its joined keys."""
        return self.keys.match(keys, start) if self.keys else NO_INDICES

    # ---------------------------------------------------------------- jobs

    def arrived(self, entries: Iterable[BlockEntry]) -> None:
        """Record blocks that move to host memory."""
        self._unwritten.extend(entry.key for entry in entries)

    def wants_to_write(self, now: float) -> bool:
        """Return whether blocks wait to be written, and a job could start."""
        return bool(self._unwritten) and self.is_ready and now >= self._paused_until and self._write_room > 0

    def write(self, now: float) -> None:
        """Start to write blocks that have moved to host memory, oldest first, up to the limit."""
        while self.wants_to_write(now):
            host_blocks = self._next_unwritten(min(_JOB_BLOCKS, self._write_room, self.pool.num_available))
            if not host_blocks:
                return
            entries = [self._host.keys.entry(block) for block in host_blocks]
            held = np.array(host_blocks, np.intp)
            self._host.share(held)
            self._writing.update(entry.key for entry in entries)
            self._has_files = True
            self._start(DiskAction.WRITE, entries, held, self.pool.take(len(entries)))

    def _next_unwritten(self, most: int) -> list[int]:
        """Return the next host blocks to write."""
        found: list[int] = []
        while self._unwritten and len(found) < most:
            key = self._unwritten[0]
            block = self._host.keys.get(key)
            if block is not None and self.keys.get(key) is None and key not in self._writing:
                if not self._host.is_idle(block):
                    break  # A step in flight still copies it.
                if block not in found:
                    found.append(block)
            self._unwritten.popleft()
        return found

    def read(self, slots: IndexArray, until: float) -> int:
        """Start to read slots to host memory, as many of the first ones as have room; return their number.

        Args:
            slots: slots in the table, in order of position.
            until: time until which requests wait for them, s.
        """
        keys = [self.keys.entry(slot).key for slot in slots.tolist()]
        new = list(itertools.takewhile(lambda key: key not in self._reading, keys))
        room = self._host.num_blocks // _READING_PART - len(self._reading)
        most = min(len(new), room, self._host.num_available)
        for first in range(0, most, _JOB_BLOCKS):
            part = slots[first : min(first + _JOB_BLOCKS, most)]
            entries = [self.keys.entry(slot) for slot in part.tolist()]
            self.pool.share(part)
            self.keys.returned[part] = True
            self._reading.update(entry.key for entry in entries)
            self._awaited.update((entry.key, until) for entry in entries)
            self._start(DiskAction.READ, entries, self._host.take(len(part)), part.copy())
        return max(0, most)

    def clear(self) -> None:
        """Drop all blocks, because some of their KV may be wrong."""
        if not self._has_files and self.is_ready:
            return
        self._has_files = False
        if self.keys:
            self.pool.distrust(where(self.keys.holds))
        for job in self._jobs.values():
            job.is_void = True
        self._unwritten.clear()
        self._awaited.clear()
        self._ignores_list = not self.is_ready
        self._send(DiskAction.CLEAR, (), ())

    def _start(self, action: DiskAction, entries: list[BlockEntry], host_blocks: IndexArray, slots: IndexArray) -> None:
        blocks = tuple(DiskBlock(slot, *entry) for slot, entry in zip(slots.tolist(), entries, strict=True))
        self._jobs[self._next_id] = _Job(action, entries, host_blocks, slots)
        self._send(action, tuple(host_blocks.tolist()), blocks)

    def _send(self, action: DiskAction, host_blocks: tuple[int, ...], blocks: tuple[DiskBlock, ...]) -> None:
        self.outbox.append(DiskJob(copy_id=self._next_id, action=action, host_blocks=host_blocks, blocks=blocks))
        self._next_id += 1

    # ---------------------------------------------------------------- reports

    def listed(self, blocks: Iterable[DiskBlock], *, is_complete: bool) -> None:
        """Add blocks that are on the worker's disk from earlier epochs."""
        if self.is_ready:
            return
        fresh: dict[int, DiskBlock] = {}
        for block in blocks if not self._ignores_list else ():
            if block.slot < self.pool.num_blocks and self.pool.is_free(block.slot) and self.keys.get(block.key) is None:
                fresh.setdefault(block.slot, block)
        added = list({block.key: block for block in fresh.values()}.values())
        slots = np.array([block.slot for block in added], np.intp)
        self.keys.add([BlockEntry(*block[1:]) for block in added], slots)
        self.pool.adopt(slots)
        self._has_files |= len(added) > 0
        self.is_ready = is_complete

    def files_refused(self, refused: Iterable[tuple[str, int]]) -> None:
        """Count files that the worker refused."""
        for reason, count in refused:
            if reason in self.refused or len(self.refused) < _MAX_REASONS:
                self.refused[reason] += count

    def reported(self, copy_id: int, failed: Collection[int], now: float) -> int:
        """Handle the end of a job; return the number of blocks that were read.

        Args:
            copy_id: the job. Unknown jobs are ignored.
            failed: positions of blocks that were not copied.
            now: the time, s.
        """
        job = self._jobs.pop(copy_id, None)
        if job is None:
            return 0
        done = np.ones(len(job.entries), np.bool_)
        done[[position for position in failed if position < len(done)]] = False
        if job.action is DiskAction.WRITE:
            self._written(job, done, now)
            return 0
        self._read(job, done)
        return int(np.count_nonzero(done))

    def _written(self, job: _Job, done: BoolArray, now: float) -> None:
        self._writing.difference_update(entry.key for entry in job.entries)
        if not done.any():  # If only some failed, single files are the reason, not the disk.
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._paused_until = now + self._pause_s
        else:
            self._pause_s = 0.0
        if not job.is_void:
            self._add(self.keys, job.entries, job.slots, done)
        self.written_blocks += int(np.count_nonzero(done))
        num_free = self.pool.num_free
        _release(self.pool, job.slots)
        if not done.all():
            # The reason may be a file that can be neither deleted nor replaced.
            self.pool.take_last(self.pool.num_free - num_free)
        _release(self._host, job.host_blocks)

    def _read(self, job: _Job, done: BoolArray) -> None:
        for entry in job.entries:
            self._reading.discard(entry.key)
            self._awaited.pop(entry.key, None)
        if not job.is_void:
            self._add(self._host.keys, job.entries, job.host_blocks, done)
        self.read_blocks += int(np.count_nonzero(done))
        _release(self._host, job.host_blocks)
        self.pool.distrust(job.slots[~done])
        _release(self.pool, job.slots)

    def _add(self, keys: HostKeys, entries: list[BlockEntry], blocks: IndexArray, done: BoolArray) -> None:
        """Add the copied blocks to a table, except those that it got in the meantime."""
        places = [place for place in where(done).tolist() if keys.get(entries[place].key) is None]
        keys.add([entries[place] for place in places], blocks[places])

    def validate(self) -> None:
        """Check that the tables are consistent with the jobs."""
        self.pool.validate(job.slots.tolist() for job in self._jobs.values())
        held = [entry.key for job in self._jobs.values() for entry in job.entries]
        assert len(held) == len(self._writing) + len(self._reading), "a block is in two jobs"
        assert self._awaited.keys() <= self._reading

    def held_tables(self) -> list[IndexArray]:
        """Return the host blocks of each job."""
        return [job.host_blocks for job in self._jobs.values()]


def _release(pool: HostPool, blocks: IndexArray) -> None:
    """Drop the reference of a job that has ended."""
    pool.release(blocks, last_step=0, answered_step=0)
