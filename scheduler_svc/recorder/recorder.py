"""Recorder: the thread that writes a core's tape into the ring of segments.

The loop only appends to the tape. The thread wakes up twice per second, encodes the new items and writes one frame, so
a killed process loses less than a second. When a segment is full, the loop forks a process, which writes its consistent
copy of the core's state to a pipe. The thread copies this output into the new segment.

A fork takes milliseconds, or longer if the state is large. After a fork that took too long, segments that begin while
requests are live have no snapshot, and a new segment begins as soon as the core is idle.

Failures of the recorder never affect the service. While writes to the disk fail, calls are encoded and discarded, and
the recorder tries to begin a new segment every minute. If the thread falls too far behind, recording stops until the
next start. An error in a live view closes the live views but does not stop the recording.
"""

import contextlib
import dataclasses
import fcntl
import gc
import json
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from protos.quire.record.v1 import record_pb2 as pb
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder.code import code_hash
from scheduler_svc.recorder.encoding import Encoder
from scheduler_svc.recorder.segments import FORMAT_VERSION, Ring, SegmentWriter
from scheduler_svc.recorder.snapshot import dump
from scheduler_svc.recorder.step_view import RequestNumbers, StepView
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Cut, Item, Reported, Tape
from shared.logging import get_logger

INTERVAL_S = 0.5
"""Time between two frames, in seconds. A killed process loses less than a second, and few frames cost little."""
_WATCHED_INTERVAL_S = 0.2
"""The same while an operator watches."""
_SNAPSHOT_INTERVAL_S = 0.02
"""The same while a snapshot is being copied."""
_RETRY_S = 60.0
_MAX_BEHIND = 200_000
"""Maximum number of items on the tape. Above it, the thread is too slow and recording stops."""
_BATCH_ITEMS = 2_000
"""Maximum number of items per frame. It bounds the frame's size and the time to serialise it."""
_MAX_FORK_S = 0.02
"""Maximum CPU time of a fork. After a longer fork, the recorder forks only while the core is idle."""
_MAX_PARTS = 64
"""Maximum number of live view parts that wait for the loop."""
_PIPE_BYTES = 1 << 20
_SNAPSHOT_S = 120
"""Timeout for a snapshot."""

log = get_logger()


@dataclass(slots=True)
class RecorderStats:
    """Recorder metrics."""

    writes: bool = True
    """Whether calls reach the disk."""
    num_bytes: int = 0
    """Bytes of all segments."""
    entries: int = 0
    """Entries written."""
    failures: int = 0
    """Failed writes, and the number of times that the thread fell behind."""
    snapshots: int = 0
    """Snapshots begun."""
    longest_fork_s: float = 0.0
    """Longest pause of the loop for a snapshot."""


class Recorder:
    """Recorder of one core."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        config: CoreConfig,
        incarnation: int,
        release: str,
        with_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lock the folder and start the thread.

        Args:
            folder: where the segments are.
            max_bytes: bound of all segments together.
            config: configuration of the core.
            incarnation: incarnation of the core.
            release: version of the scheduler.
            with_tokens: whether token ids are recorded.
            clock: the core's clock.

        Raises:
            FolderInUseError: another process records into the folder.
            OSError: the folder cannot be used.
        """
        self.tape = Tape()
        self.stats = RecorderStats()
        self.folder = folder
        self.numbers = RequestNumbers()
        self._ring = Ring(folder, max_bytes)
        self._tagger = Tagger()
        self._with_tokens = with_tokens
        self._encoder = Encoder(self._tagger, with_tokens=with_tokens)
        self._config = json.dumps(dataclasses.asdict(config))
        self._incarnation, self._release = incarnation, release
        self._unix_offset_ns = time.time_ns() - round(clock() * 1e9)
        self._writer: SegmentWriter | None = None
        self._retry_at = 0.0
        self._wants_cut = False
        self._cut_asked = True
        """Whether the thread has requested a new segment that has not begun. Only the thread uses it."""
        self._full_at = self._ring.segment_bytes
        """Segment size, without its snapshot, at which the next segment begins."""
        self._snapshot_pid, self._snapshot_pipe = 0, -1
        self._fork_s = 0.0
        """CPU time of the last fork."""
        self._lacks_snapshot = False
        """Whether the loop has begun the segment without a snapshot."""
        self._clock = clock
        self._is_watched = False
        self.views_failed = False
        """Whether an error has ended the live views."""
        # Append and pop are atomic, so the loop may take parts concurrently.
        self._parts: deque[admin.WatchStepsResponse] = deque()
        self._view_errors = 0
        self._dropped_steps = 0
        """Steps omitted from live views since the last part."""
        self._is_ending = False
        self._wake = threading.Event()
        self._write_waits: deque[int] = deque()
        """Write ends of the pipes that `when_written` returned, in order."""
        self.tape.cut(clock())
        self._is_fresh = True
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- called by the scheduling loop

    def turn(self, core: Scheduler, now: float) -> None:
        """Begin a segment if it is due; call once per turn of the loop, between calls to the core."""
        if self.tape.is_off:
            return
        if len(self.tape.items) > _MAX_BEHIND:
            self.tape.is_off = True
            self._failed("it cannot keep up with the service", "off until the next start")
        elif self._wants_cut or (self._lacks_snapshot and core.is_idle):
            self._wants_cut = False
            self._cut(core, now)

    def reported(self, frontend: Peer, report: link_pb2.RequestReport, now: float) -> None:
        """Record a front end's report."""
        self.tape.append(Reported(frontend, report, now))

    def watch(self, is_on: bool) -> None:
        """Start or stop making live view parts."""
        if is_on and not self._is_watched:
            self.views_failed = False
        self._is_watched = is_on

    def take_views(self) -> Iterator[admin.WatchStepsResponse]:
        """Yield the parts of live views that have been made since the last call."""
        while self._parts:
            yield self._parts.popleft()

    def when_written(self) -> int:
        """Return a file descriptor that becomes readable once all items that are now on the tape have been written.

        The thread wakes up for it. If recording has stopped, the descriptor is readable immediately. The caller closes
        it.
        """
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._write_waits.append(writing)
        self._wake.set()
        if not self._thread.is_alive():
            self._end_write_waits(len(self._write_waits))
        return reading

    def close(self) -> None:
        """Write the remaining items and stop the thread."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._ring.close()

    def _cut(self, core: Scheduler, now: float) -> None:
        began = time.perf_counter()
        core.tidy()
        self._lacks_snapshot = self._fork_s > _MAX_FORK_S and not core.is_idle
        if self._lacks_snapshot:
            self.tape.cut(now)
            return
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        spent = time.thread_time()
        try:
            pid = os.fork()
        except OSError as error:
            log.warning("flight recorder: no snapshot; a replay cannot start at this segment", error=str(error))
            os.close(reading)
            os.close(writing)
            self.tape.cut(now)
            return
        if not pid:
            _write_snapshot(writing, core, self._tagger, with_tokens=self._with_tokens)
        self._fork_s = time.thread_time() - spent
        os.close(writing)
        self.stats.snapshots += 1
        self.stats.longest_fork_s = max(self.stats.longest_fork_s, time.perf_counter() - began)
        self.tape.cut(now, pid, reading)

    # ---------------------------------------------------------------- run by the recorder's thread

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                copies = self._snapshot_pipe >= 0
                interval_s = _WATCHED_INTERVAL_S if self._is_watched else INTERVAL_S
                self._wake.wait(_SNAPSHOT_INTERVAL_S if copies else interval_s)
                self._wake.clear()
                is_last, num_waits = self._is_ending, len(self._write_waits)
                self._round()
                self._end_write_waits(num_waits)
        except Exception as error:
            self.tape.is_off = True
            self._failed(repr(error), "off until the next start; please report this")
        finally:
            self._forget_snapshot()
            self.tape.items.clear()
            if self._writer is not None:
                self._writer.close()
            self._end_write_waits(len(self._write_waits))

    def _end_write_waits(self, count: int) -> None:
        for _ in range(count):
            # The loop and the thread may both end waits when the thread exits.
            with contextlib.suppress(IndexError):
                writing = self._write_waits.popleft()
                # A snapshot process may still have the pipe open, so a byte is the signal. The reader may be gone.
                with contextlib.suppress(BrokenPipeError):
                    os.write(writing, b".")
                os.close(writing)

    def _round(self) -> None:
        tape = self.tape.items
        encoder = self._encoder
        if self._is_watched is (encoder.view is None) and not (self._is_watched and self.views_failed):
            encoder.view = StepView(self._unix_offset_ns, self.numbers) if self._is_watched else None
            self._parts.clear()
        # Calls that arrive during encoding wait for the next round, so that a busy loop cannot keep a segment open.
        pending = len(tape)
        while pending:
            items: list[Item] = []
            cut: Cut | None = None
            while pending and len(items) < _BATCH_ITEMS:
                item = tape.popleft()
                pending -= 1
                if isinstance(item, Cut):
                    cut = item
                    break
                items.append(item)
            if items:
                before = encoder.num_entries
                encoder.encode(items)
                self._write(encoder.take(), encoder.num_entries - before)
                self._show()
            if cut is not None:
                self._begin(cut)
        now = self._clock()
        if encoder.view is not None and encoder.view.is_load_due(now):
            encoder.show_load(now)
            self._show()
        if self._snapshot_pipe >= 0:
            self._copy_snapshot()
        if self._writer is None:
            is_due = time.monotonic() > self._retry_at
        else:
            is_due = self._writer.size > self._full_at and self._snapshot_pipe < 0
        if is_due and not self._cut_asked:
            self._cut_asked = self._wants_cut = True

    def _show(self) -> None:
        """Pass a live view part to the loop, or drop it if the loop does not take parts."""
        encoder = self._encoder
        if encoder.view_error is not None:
            error, encoder.view_error = encoder.view_error, None
            if not self._view_errors:
                log.error("live views ended by an error; recording continues; please report this", exc_info=error)
            self._view_errors += 1
            self.views_failed = True
        part = None if encoder.view is None else encoder.view.take()
        if part is None:
            return
        if len(self._parts) >= _MAX_PARTS:
            self._dropped_steps += len(part.steps)
            return
        part.dropped_steps, self._dropped_steps = self._dropped_steps, 0
        self._parts.append(part)

    def _begin(self, cut: Cut) -> None:
        self._cut_asked = False
        self._forget_snapshot()
        self._snapshot_pid, self._snapshot_pipe = cut.pid, cut.pipe
        self._full_at = self._ring.segment_bytes
        self._retry_at = time.monotonic() + _RETRY_S
        # The opening refers to peers, which are in the same batch.
        opening = self._encoder.begin(cut.now)
        batch = self._encoder.take()
        opening.version, opening.release, opening.code = FORMAT_VERSION, self._release, code_hash()
        opening.config, opening.incarnation = self._config, self._incarnation
        opening.unix_ns, opening.fresh = self._unix_offset_ns + opening.core_ns, self._is_fresh
        opening.needs_earlier = not self._is_fresh and not cut.pid
        self._is_fresh = False
        batch.opening.CopyFrom(opening)
        try:
            self._writer = self._ring.begin(self._writer)
        except OSError as error:
            self._writer = None
            self._forget_snapshot()
            self._failed(str(error), "another segment is tried every minute")
            return
        if not self.stats.writes and not self.tape.is_off:
            self.stats.writes = True
            log.info("flight recorder: recording again")
        self._write(batch)

    def _write(self, batch: pb.Batch, num_entries: int = 0) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(batch)
            self._ring.make_room(self._writer.size)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
            self._failed(str(error), "another segment is tried every minute")
            return
        self.stats.entries += num_entries
        self.stats.num_bytes = self._ring.num_bytes + self._writer.size

    def _failed(self, reason: str, then: str) -> None:
        self.stats.failures += 1
        if self.stats.writes:
            self.stats.writes = False
            log.warning("flight recorder: not recording; the service continues", reason=reason, then=then)

    def _copy_snapshot(self) -> None:
        """Copy the snapshot process's output into the segment."""
        while select.select([self._snapshot_pipe], [], [], 0)[0]:
            part = os.read(self._snapshot_pipe, _PIPE_BYTES)
            if part:
                self._write(pb.Batch(snapshot=part))
                self._full_at += len(part)
                continue
            _, status = os.waitpid(self._snapshot_pid, 0)
            os.close(self._snapshot_pipe)
            self._snapshot_pid, self._snapshot_pipe = 0, -1
            if status == 0:
                self._write(pb.Batch(snapshot_complete=True))
            else:
                log.warning(
                    "flight recorder: the snapshot failed; a replay cannot start at this segment", status=status
                )
            return

    def _forget_snapshot(self) -> None:
        """Kill the process of a snapshot that is no longer needed."""
        if self._snapshot_pipe >= 0:
            os.close(self._snapshot_pipe)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._snapshot_pid, signal.SIGKILL)
                os.waitpid(self._snapshot_pid, 0)
            self._snapshot_pid, self._snapshot_pipe = 0, -1


def _write_snapshot(pipe: int, core: Scheduler, tagger: Tagger, *, with_tokens: bool) -> None:
    """Write the core's state into a pipe and exit; runs in a forked process."""
    status = 1
    try:
        gc.disable()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_SNAPSHOT_S)
        # Sockets and folder locks remain with the parent process.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 20)
        os.nice(10)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(pipe, True)
        data = memoryview(dump(core, tagger, with_tokens=with_tokens))
        while data:
            data = data[os.write(pipe, data) :]
        status = 0
    finally:
        os._exit(status)
