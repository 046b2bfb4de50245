"""Disk tier: executes the scheduler's copies between host memory and disk in one thread, never in a step.

The scheduler decides what is copied, and does not use the blocks of a job for anything else until the job's report. The
thread copies through a buffer of one block. Host memory is accessed under a lock and only for jobs of the present
session, so after `reset` no job changes host memory. A checksum is verified before bytes reach host memory.

Reads come first, because requests wait for them. Other jobs keep their order. After a failed write, which usually means
that the disk is full, the scheduler pauses writing. A disk that hangs blocks the thread, not the worker.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from shared.logging import get_logger
from worker_svc.interface.arrays import ByteArray
from worker_svc.interface.disk import DiskAction, DiskBlock, DiskJob, DiskReport
from worker_svc.memory.disk_files import BlockFiles, RefusedFileError

_FOUND_PER_REPORT = 4096
"""Maximum number of blocks in one report, so that no message is long."""
_MAX_JOBS = 4096
"""Maximum number of waiting jobs. The scheduler has far fewer in flight."""


class HostBytes:
    """The bytes of host blocks, for all layers together."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Create views of contiguous tensors on the CPU, `[num_host_blocks, …]` each."""
        self._parts = [tensor.view(torch.uint8).reshape(len(tensor), -1).numpy() for tensor in tensors]
        self.layout = [(str(tensor.dtype), list(tensor.shape[1:])) for tensor in tensors]
        """Types and shapes of a block's parts."""
        self.block_bytes = sum(part.shape[1] for part in self._parts)

    def copy_out(self, block: int, into: ByteArray) -> None:
        """Copy a host block into a buffer of `block_bytes` bytes."""
        for part, place in self._places(into):
            np.copyto(place, part[block])

    def copy_in(self, content: ByteArray, block: int) -> None:
        """Copy a buffer of `block_bytes` bytes into a host block."""
        for part, place in self._places(content):
            np.copyto(part[block], place)

    def _places(self, buffer: ByteArray) -> Iterator[tuple[ByteArray, ByteArray]]:
        first = 0
        for part in self._parts:
            yield part, buffer[first : first + part.shape[1]]
            first += part.shape[1]


class DiskTier:
    """The thread that copies blocks between host memory and the files of one worker."""

    def __init__(self, files: BlockFiles, host: HostBytes) -> None:
        """Start the thread, which first checks the files of earlier runs."""
        self._files, self._host = files, host
        self._buffer: ByteArray = np.empty(host.block_bytes, np.uint8)
        self._condition = threading.Condition()
        self._session = 0
        """Number of the present session; jobs of earlier ones are dropped."""
        self._reads: deque[DiskJob] = deque()
        self._others: deque[DiskJob | None] = deque()
        """None stands for the list of blocks on disk."""
        self._is_working = True
        self._reports: deque[DiskReport] = deque()
        self._is_stopped = False
        self._stored: dict[int, DiskBlock] = {}
        """The complete files, by slot. Only the thread uses it."""
        self._write_failed = False
        self._read_failed = False
        """Whether the last block that was read was refused."""
        # A daemon, because a disk that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="disk tier", daemon=True)
        self._thread.start()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that fit on disk."""
        return self._files.num_slots

    @property
    def is_busy(self) -> bool:
        """Whether reports are due soon."""
        with self._condition:
            return bool(self._is_working or self._reads or self._others or self._reports)

    def begin_session(self) -> None:
        """Report the blocks on disk, for a scheduler that does not know them."""
        with self._condition:
            self._drop()
            self._others.append(None)
            self._condition.notify()

    def submit(self, job: DiskJob) -> None:
        """Queue a job of the present session."""
        with self._condition:
            if len(self._reads) + len(self._others) >= _MAX_JOBS:
                self._reports.append(DiskReport(copy_id=job.copy_id, failed=tuple(range(len(job.blocks)))))
                return
            (self._reads if job.action is DiskAction.READ else self._others).append(job)
            self._condition.notify()

    def next_report(self) -> DiskReport | None:
        """Return the oldest report without removing it, or None."""
        with self._condition:
            return self._reports[0] if self._reports else None

    def report_sent(self) -> None:
        """Remove the oldest report."""
        with self._condition:
            if self._reports:
                self._reports.popleft()

    def reset(self) -> None:
        """End the session: no job changes host memory after the return."""
        with self._condition:
            self._drop()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop the thread, and release the files unless a job takes longer than `timeout_s`."""
        with self._condition:
            self._drop()
            self._is_stopped = True
            self._condition.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._files.close()

    def _drop(self) -> None:
        self._session += 1
        self._reads.clear()
        # A list that an earlier session did not get is made again, but files must still be deleted.
        clears = [job for job in self._others if job is not None and job.action is DiskAction.CLEAR]
        self._others.clear()
        self._others.extend(clears)
        self._reports.clear()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._stored = {block.slot: block for block in self._files.scan()}
        except OSError as error:
            get_logger().warning("blocks on disk cannot be listed; starting without them", reason=str(error))
        if self._stored or self._files.refused:
            get_logger().info("blocks on disk", blocks=len(self._stored), refused=dict(self._files.refused))
        while True:
            with self._condition:
                self._is_working = False
                while not (self._reads or self._others or self._is_stopped):
                    self._condition.wait()
                if self._is_stopped and not self._others:
                    return
                job = self._reads.popleft() if self._reads else self._others.popleft()
                session, self._is_working = self._session, True
            if job is None:
                self._list(session)
            else:
                self._execute(job, session)

    def _list(self, session: int) -> None:
        """Report the blocks on disk in parts."""
        blocks = list(self._stored.values())
        for first in range(0, max(1, len(blocks)), _FOUND_PER_REPORT):
            part = tuple(blocks[first : first + _FOUND_PER_REPORT])
            is_last = first + _FOUND_PER_REPORT >= len(blocks)
            self._report(DiskReport(found=part, is_complete=is_last), session)

    def _execute(self, job: DiskJob, session: int) -> None:
        began_ns = time.perf_counter_ns()
        failed: list[int] = []
        if job.action is DiskAction.CLEAR:
            try:
                self._files.clear()
            except OSError as error:
                get_logger().warning("blocks on disk not deleted", reason=str(error))
            self._stored.clear()
        for position, (block, host_block) in enumerate(zip(job.blocks, job.host_blocks.tolist(), strict=True)):
            copy = self._read if job.action is DiskAction.READ else self._write
            if not copy(block, host_block, session):
                failed.append(position)
        duration_ns = time.perf_counter_ns() - began_ns
        self._report(DiskReport(copy_id=job.copy_id, failed=tuple(failed), duration_ns=duration_ns), session)

    def _write(self, block: DiskBlock, host_block: int, session: int) -> bool:
        with self._condition:
            if session != self._session:
                return False
            self._host.copy_out(host_block, self._buffer)
        self._stored.pop(block.slot, None)
        try:
            self._files.write(block, self._buffer.data)
        except OSError as error:
            if not self._write_failed:
                get_logger().warning("blocks cannot be written to disk; they are dropped instead", reason=str(error))
            self._write_failed = True
            return False
        self._write_failed = False
        self._stored[block.slot] = block
        return True

    def _read(self, block: DiskBlock, host_block: int, session: int) -> bool:
        try:
            self._files.read(block, self._buffer.data)
        except RefusedFileError as error:
            if not self._read_failed:
                get_logger().warning("blocks on disk refused; their tokens are computed", reason=str(error))
            self._read_failed = True
            self._stored.pop(block.slot, None)
            return False
        self._read_failed = False
        with self._condition:
            if session != self._session:
                return False
            self._host.copy_in(self._buffer, host_block)
        return True

    def _report(self, report: DiskReport, session: int) -> None:
        with self._condition:
            if session != self._session:
                return
            self._reports.append(replace(report, refused=dict(self._files.refused)))
            self._files.refused.clear()
