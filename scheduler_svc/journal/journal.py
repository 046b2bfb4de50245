"""The journal as the scheduler's loop sees it: told of every effect, committed once a turn, before anything goes out.

A turn's records are one frame and one write. How far the disk must be before front ends are told is `fsync`: with
"none" and "interval" a write is enough, which survives the death of any process; with "step" `durable` follows the
disk, which survives the death of the machine.

Segments bound it. A segment goes when no request was last written as a whole in it or before it; so that this comes
about, requests from the oldest one are written again, a little with each commit, once what is of no use takes up much
of the space, or the segment is old. Should what counts itself be too much, the oldest requests are no longer covered.

A write that fails ends nothing: requests are served without a journal, which the log and the metrics say, and from time
to time a new segment is tried, which begins with all that counts.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protos.quire.journal.v1 import journal_pb2
from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from scheduler_svc.frontend_link import to_stream_end, to_submission
from scheduler_svc.journal.book import Book
from scheduler_svc.journal.recovery import recover, to_event
from scheduler_svc.journal.segments import HEADER_BYTES, Folder, append, frame
from scheduler_svc.journal.syncer import Syncer
from shared.columns import to_column
from shared.logging import get_logger

FSYNC_MODES = ("none", "interval", "step")
_SEGMENTS = 8
"""Segments that a full journal has, roughly."""
_AGAIN_BYTES = 256 << 10
"""Most bytes of requests that are written again in one commit."""
_RETRY_S = 5.0
_MAX_NUMBER = 0x7FFFFFFF

log = get_logger()


@dataclass(slots=True, kw_only=True)
class JournalStats:
    """Figures for metrics."""

    commits: int = 0
    failures: int = 0
    """Writes and syncs that failed."""
    forgotten: int = 0
    """Requests that are not covered for want of space."""


@dataclass(slots=True)
class _Segment:
    size: int
    born_ms: int


class Journal:
    """Writes a folder.

    Args:
        path: the folder; made if it is not there.
        max_bytes: most space that it takes, roughly.
        keep_s: for how long the core keeps what nobody comes back for.
        fsync: one of FSYNC_MODES.
        fsync_interval_s: for "interval".
        clock_ms: milliseconds since 1970.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        keep_s: float,
        fsync: str = "none",
        fsync_interval_s: float = 0.1,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.stats = JournalStats()
        self.written = 0
        """Bytes written in this process's life; what was committed is before this position."""
        self._max_bytes = max_bytes
        self._keep_ms = int(keep_s * 1000)
        self._fsync = fsync
        self._clock_ms = clock_ms
        self._folder = Folder(path)
        try:
            found = recover(self._folder)
            found.report()
            self.restored = to_event(found.book, clock_ms())
            """For the core, before anything else."""
            self._book = _as_restored(found.book)
            self._segments: dict[int, _Segment] = {
                segment.number: _Segment(segment.size, 0) for segment in found.segments
            }
            self._numbers = itertools.count(1 + max((entry.number for entry in self._book), default=0))
            self._streams: dict[ev.Peer, dict[int, int]] = {}
            """Numbers of live requests by front end and stream."""
            self._model = ""
            self._clear()
            self._doomed: deque[tuple[int, int]] = deque()
            """(position, segment): segments to delete when the disk has everything up to the position."""
            self._retry_at = 0.0
            self._descriptor: int | None = None
            self._syncer: Syncer | None = None
            if fsync != "none":
                self._syncer = Syncer(self._folder.sync, interval_s=fsync_interval_s if fsync == "interval" else 0.0)
            self._begin(fresh=True)
        except BaseException:
            self._folder.close()
            raise

    @property
    def durable(self) -> int:
        """What was committed before this position may be told to front ends."""
        if self._syncer is None or self._fsync != "step" or self._descriptor is None:
            return self.written
        return self._syncer.synced

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when `durable` may have grown."""
        return () if self._syncer is None or self._fsync != "step" else (self._syncer.woken,)

    @property
    def num_bytes(self) -> int:
        """Space that it takes."""
        return sum(segment.size for segment in self._segments.values())

    def __len__(self) -> int:
        """Requests that it covers."""
        return len(self._book)

    @property
    def covers(self) -> bool:
        """Whether what is committed is written; otherwise the disk does not take it."""
        return self._descriptor is not None

    def of_other_models(self, fingerprint: str) -> tuple[bytes, ...]:
        """Identities of requests that nobody computes any more and that were another model's."""
        return tuple(
            entry.submission.identity
            for entry in self._book
            if not entry.live and entry.model and entry.model != fingerprint
        )

    # ---------------------------------------------------------------- what a turn brings

    def note(self, effect: ef.Effect) -> None:
        """One of the core's effects, in order."""
        match effect:
            case ef.TokensReady():
                streams = self._streams.get(effect.frontend)
                if streams:
                    self._note_tokens(effect, streams)
            case ef.ScoresReady():
                number = self._number(effect.frontend, effect.stream)
                if number and not effect.of_prompt:
                    self._batch.scores.add(number=number, first_index=effect.first_index, scores=effect.scores)
            case ef.LogBegun():
                self._note_begin(effect)
            case ef.LogEnded():
                number = self._streams.get(effect.frontend, {}).pop(effect.stream, 0)
                if number:
                    end = to_stream_end(effect.end).SerializeToString() if effect.end is not None else b""
                    self._ended[number] = journal_pb2.Ended(number=number, end=end, unix_ms=self._clock_ms())
            case ef.LogDropped():
                begun = self._begun.pop(effect.identity, None)
                if begun is not None:
                    self._ended.pop(begun.number, None)
                entry = self._book.find(effect.identity)
                if entry is not None:
                    self._dropped.append(entry.number)
            case ef.ServiceChanged(model=model) if model is not None:
                self._model = model.fingerprint

    def _note_tokens(self, effect: ef.TokensReady, streams: dict[int, int]) -> None:
        numbers = np.array([streams.get(stream, 0) for stream in effect.streams.tolist()], np.int32)
        columns = (numbers, effect.first_indices, effect.tokens)
        covered = numbers > 0
        if not covered.all():
            columns = (numbers[covered], effect.first_indices[covered], effect.tokens[covered])
        for column, values in zip(self._columns, columns, strict=True):
            column.append(to_column(values))

    def _note_begin(self, effect: ef.LogBegun) -> None:
        request = effect.request
        known = self._book.find(request.identity)
        number = next(number for number in self._numbers if self._book.get(number) is None)
        if number >= _MAX_NUMBER:
            self._numbers = itertools.count(1)
        entry = journal_pb2.Entry(
            number=number,
            submission=to_submission(request, to_column(request.token_ids)).SerializeToString(),
            model=(known.model if known is not None else "") or self._model,
        )
        for index, scores in effect.scores:
            entry.scores.add(first_index=index, scores=scores)
        self._begun[request.identity] = entry
        self._streams.setdefault(request.frontend, {})[request.stream] = number

    def _number(self, frontend: ev.Peer, stream: int) -> int:
        return self._streams.get(frontend, {}).get(stream, 0)

    def _clear(self) -> None:
        self._batch = journal_pb2.Batch()
        self._begun: dict[bytes, journal_pb2.Entry] = {}
        """By identity; one that is refused in the same turn is not written."""
        self._columns: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        self._ended: dict[int, journal_pb2.Ended] = {}
        """By number."""
        self._dropped: list[int] = []

    # ---------------------------------------------------------------- commits

    def commit(self) -> None:
        """Writes what was noted since the last commit, and tidies up a little. Never raises."""
        now_ms = self._clock_ms()
        if self._syncer is not None:
            self._syncer.acknowledge()
            if self._syncer.failure is not None and self._descriptor is not None:
                self._fail(self._syncer.failure)
        batch = self._take(now_ms)
        if batch is not None:
            self._book.apply(batch, self._newest)
            self.stats.commits += 1
            self._write(frame(batch))
        if self._descriptor is None:
            self._try_again()
        else:
            self._tidy(now_ms)

    def close(self) -> None:
        """Commits, brings everything to the disk as `fsync` says, and lets others have the folder."""
        self.commit()
        if self._syncer is not None:
            self._syncer.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._folder.close()

    def _take(self, now_ms: int) -> journal_pb2.Batch | None:
        batch, begun, columns, ended, dropped = self._batch, self._begun, self._columns, self._ended, self._dropped
        if not (begun or columns[0] or ended or dropped or batch.scores):
            return None
        self._clear()
        batch.unix_ms = now_ms
        batch.entries.extend(begun.values())
        batch.ended.extend(ended.values())
        batch.numbers, batch.indices, batch.tokens = map(b"".join, columns)
        batch.dropped = to_column(dropped)
        for frontend in [frontend for frontend, streams in self._streams.items() if not streams]:
            del self._streams[frontend]
        return batch

    @property
    def _newest(self) -> int:
        return next(reversed(self._segments), 0)

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            append(self._descriptor, data)
        except OSError as error:
            self._fail(error)
            return
        self.written += len(data)
        self._segments[self._newest].size += len(data)
        if self._syncer is not None:
            self._syncer.want(self._descriptor, self.written)

    def _begin(self, *, fresh: bool) -> None:
        """A new segment; `fresh`: it begins with all that counts, and those before it may go.

        Raises:
            OSError: it cannot be written.
        """
        number, before = self._newest + 1, list(self._segments)
        descriptor = self._folder.begin(number)
        batch, data = journal_pb2.Batch(fresh=True, unix_ms=self._clock_ms()), b""
        if fresh:
            batch.entries.extend(entry.record() for entry in self._book)
            data = frame(batch)
            try:
                append(descriptor, data)
            except OSError:
                os.close(descriptor)
                self._folder.delete(number)
                raise
        if self._descriptor is not None and self._syncer is None:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._segments[number] = _Segment(HEADER_BYTES + len(data), self._clock_ms())
        self.written += HEADER_BYTES + len(data)
        if self._syncer is not None:
            self._syncer.want(descriptor, self.written)
        if fresh:
            self._book.apply(batch, number)
            self._doomed = deque((self.written, each) for each in before)

    def _fail(self, error: OSError) -> None:
        """The disk does not take what we write; the present segment may end in the midst of a frame."""
        self.stats.failures += 1
        log.error("the journal cannot be written; requests are served without it", error=str(error))
        if self._syncer is None and self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._retry_at = time.monotonic() + _RETRY_S

    def _try_again(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        if self._syncer is not None:
            self._syncer.start_over()
        try:
            self._begin(fresh=True)
        except OSError as error:
            self._fail(error)
            return
        log.info("the journal is written again", requests=len(self._book))

    # ---------------------------------------------------------------- bounds

    def _tidy(self, now_ms: int) -> None:
        newest = self._segments[self._newest]
        is_old = now_ms - newest.born_ms > self._keep_ms and newest.size > HEADER_BYTES
        if is_old or newest.size >= self._max_bytes // _SEGMENTS:
            try:
                self._begin(fresh=False)
            except OSError as error:
                self._fail(error)
                return
        oldest = next(iter(self._segments))
        if oldest != self._newest and oldest not in (number for _, number in self._doomed):
            if self._is_wasteful() or now_ms - self._segments[oldest].born_ms > 2 * self._keep_ms:
                self._write_again(oldest, now_ms)
            if self.num_bytes > self._max_bytes:
                self._forget(oldest, now_ms)
            if all(entry.segment > oldest for entry in itertools.islice(self._book, 1)):
                self._doomed.append((self.written, oldest))
        on_disk = self.written if self._syncer is None else self._syncer.synced
        while self._doomed and self._doomed[0][0] <= on_disk:
            number = self._doomed[0][1]
            try:
                self._folder.delete(number)
            except OSError as error:
                self._fail(error)
                return
            self._doomed.popleft()
            del self._segments[number]

    def _is_wasteful(self) -> bool:
        """Whether much of the space is used up by what does not count any longer."""
        total = self.num_bytes
        if total <= self._max_bytes // 2:
            return False
        return total - sum(entry.size for entry in self._book) >= self._max_bytes // 4

    def _write_again(self, oldest: int, now_ms: int) -> None:
        """Moves requests of the oldest segment to the newest, a few."""
        batch = journal_pb2.Batch(unix_ms=now_ms)
        size = 0
        for entry in self._book:
            if entry.segment > oldest or size >= _AGAIN_BYTES:
                break
            batch.entries.append(entry.record())
            size += entry.size
        if batch.entries:
            self._book.apply(batch, self._newest)
            self._write(frame(batch))

    def _forget(self, oldest: int, now_ms: int) -> None:
        """Covers the requests of the oldest segment no longer."""
        numbers = [entry.number for entry in itertools.takewhile(lambda entry: entry.segment <= oldest, self._book)]
        if numbers:
            self.stats.forgotten += len(numbers)
            log.warning(
                "the journal is too small; its oldest requests are not covered any longer", requests=len(numbers)
            )
            batch = journal_pb2.Batch(unix_ms=now_ms, dropped=to_column(numbers))
            self._book.apply(batch, self._newest)
            self._write(frame(batch))


def _as_restored(book: Book) -> Book:
    """What the core will say of what was found: nobody computes it now."""
    for entry in book:
        if entry.live:
            entry.live, entry.ended_ms = False, book.last_ms
    return book
