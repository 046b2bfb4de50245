"""Journal writer: receives every effect, and commits once per turn, before messages are sent to front ends.

One turn's records are one frame and one write. `fsync` determines when messages may be sent. With "none" and "interval"
they are sent after the write, which survives a crash of the processes. With "step" they are sent when `durable` shows
that the disk has the data, which survives a crash of the machine.

The journal is a sequence of segments. A segment can be deleted when every entry was later written completely to a newer
segment. Compaction ensures this: if much of the space is stale or the oldest segment is old, each commit rewrites some
entries of the oldest segment. If the live entries exceed the limit, the oldest entries are dropped.

After a failed write, requests are served without the journal, which the log and the metrics report. The journal
periodically tries to write a new segment, which starts with all live entries.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protos.quire.journal.v1 import journal_pb2
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.frontend.link import to_stream_end, to_submission
from scheduler_svc.journal.book import Book
from scheduler_svc.journal.recovery import Found, recover, to_event
from scheduler_svc.journal.segments import HEADER, open_folder
from scheduler_svc.journal.syncer import Syncer
from scheduler_svc.segments import SegmentFile, frame
from shared.columns import to_column
from shared.logging import get_logger

FSYNC_MODES = ("none", "interval", "step")
_SEGMENTS = 8
"""Approximate number of segments in a full journal."""
_AGAIN_BYTES = 256 << 10
"""Maximum number of bytes that one commit rewrites."""
_RETRY_S = 5.0
_SYNC_EVERY_S = 0.1
"""Interval of syncs in mode "interval"."""
_MAX_NUMBER = 0x7FFFFFFF

log = get_logger()


@dataclass(slots=True, kw_only=True)
class JournalStats:
    """Counters for metrics."""

    failures: int = 0
    """Failed writes and syncs."""
    forgotten: int = 0
    """Requests dropped because the journal was full."""


@dataclass(slots=True)
class _Segment:
    size: int
    born_ms: int


class Journal:
    """Writer of a journal folder.

    Args:
        path: the folder; created if it does not exist.
        max_bytes: approximate limit of the size on disk, in bytes.
        keep_s: time for which the core retains an ended request for its client, in seconds.
        fsync: one of FSYNC_MODES.
        clock_ms: returns the time in ms since 1970.
        reports: whether to log what the folder holds.
        found: content of the folder, if it was read already. The journal then continues it. Otherwise, it is read, and
            all requests are written to a new segment.

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
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        reports: bool = True,
        found: Found | None = None,
    ) -> None:
        self.stats = JournalStats()
        self.written = 0
        """Number of bytes written by this process, which is the position after the last commit."""
        self._max_bytes = max_bytes
        self._keep_ms = int(keep_s * 1000)
        self._fsync = fsync
        self._clock_ms = clock_ms
        self._folder = open_folder(path)
        try:
            is_fresh = found is None
            found = found or recover(self._folder)
            if reports:
                found.report()
            self.restored = to_event(found.book, clock_ms())
            """Event with the previous process's requests; the core's first event."""
            self._book = _as_restored(found.book)
            born_ms = 0 if is_fresh else clock_ms()
            self._segments: dict[int, _Segment] = {
                segment.number: _Segment(segment.size, born_ms) for segment in found.segments
            }
            self._numbers = itertools.count(1 + max((entry.number for entry in self._book), default=0))
            self._streams: dict[ev.Peer, dict[int, int]] = {}
            """Entry numbers of live requests, by front end and stream."""
            self._model = ""
            self._clear()
            self._doomed: deque[tuple[int, int]] = deque()
            """(position, segment): segments to delete when all data up to the position is on disk."""
            self._retry_at = 0.0
            self._file: SegmentFile | None = None
            """The newest segment; None after a failed write."""
            self._syncer: Syncer | None = None
            if fsync != "none":
                self._syncer = Syncer(self._folder.sync, interval_s=_SYNC_EVERY_S if fsync == "interval" else 0.0)
            self._begin(fresh=is_fresh)
        except BaseException:
            self._folder.close()
            raise

    @property
    def durable(self) -> int:
        """Position up to which commits are durable, so that their messages may be sent to front ends."""
        if self._syncer is None or self._fsync != "step" or self._file is None:
            return self.written
        return self._syncer.synced

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that become readable when `durable` may have advanced."""
        return () if self._syncer is None or self._fsync != "step" else (self._syncer.woken,)

    @property
    def num_bytes(self) -> int:
        """Size on disk in bytes."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def extents(self) -> dict[int, int]:
        """Number of bytes written to each segment, by its number, oldest first."""
        return {number: segment.size for number, segment in self._segments.items()}

    def path(self, segment: int) -> Path:
        """Return the file of a segment."""
        return self._folder.file(segment)

    def __len__(self) -> int:
        return len(self._book)

    @property
    def covers(self) -> bool:
        """Whether commits are written; False after a failed write."""
        return self._file is not None

    def of_other_models(self, fingerprint: str) -> tuple[bytes, ...]:
        """Return the identities of ended requests that belong to another model."""
        return tuple(
            entry.submission.identity
            for entry in self._book
            if not entry.live and entry.model and entry.model != fingerprint
        )

    # ---------------------------------------------------------------- effects

    def note(self, effect: ef.Effect) -> None:
        """Record an effect of the core. Call with all effects, in order."""
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
        of_tokens, indices = effect.each()
        numbers = np.array([streams.get(stream, 0) for stream in of_tokens.tolist()], np.int32)
        columns = (numbers, indices, effect.tokens)
        covered = numbers > 0
        if not covered.all():
            columns = (numbers[covered], indices[covered], effect.tokens[covered])
        for column, values in zip(self._columns, columns, strict=True):
            column.append(to_column(values))

    def _note_begin(self, effect: ef.LogBegun) -> None:
        spec = effect.spec
        known = self._book.find(spec.identity)
        number = next(number for number in self._numbers if self._book.get(number) is None)
        if number >= _MAX_NUMBER:
            self._numbers = itertools.count(1)
        entry = journal_pb2.Entry(
            number=number,
            submission=to_submission(spec, effect.tokens).SerializeToString(),
            model=spec.model or (known.model if known is not None else "") or self._model,
        )
        for index, scores in effect.scores:
            entry.scores.add(first_index=index, scores=scores)
        self._begun[spec.identity] = entry
        self._streams.setdefault(effect.frontend, {})[effect.stream] = number

    def _number(self, frontend: ev.Peer, stream: int) -> int:
        return self._streams.get(frontend, {}).get(stream, 0)

    def _clear(self) -> None:
        self._batch = journal_pb2.Batch()
        self._begun: dict[bytes, journal_pb2.Entry] = {}
        """New entries by identity; an entry that is dropped in the same turn is not written."""
        self._columns: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        self._ended: dict[int, journal_pb2.Ended] = {}
        """Ends by entry number."""
        self._dropped: list[int] = []

    # ---------------------------------------------------------------- commits

    def commit(self) -> None:
        """Write the effects since the last commit, and do a small part of the compaction. Never raises."""
        now_ms = self._clock_ms()
        if self._syncer is not None:
            self._syncer.acknowledge()
            if self._syncer.failure is not None and self._file is not None:
                self._fail(self._syncer.failure)
        batch = self._take(now_ms)
        if batch is not None:
            self._book.apply(batch, self._newest)
            self._write(frame(batch.SerializeToString()))
        if self._file is None:
            self._try_again()
        else:
            self._tidy(now_ms)

    def close(self) -> None:
        """Commit, sync as set by `fsync`, and release the folder."""
        self.commit()
        if self._syncer is not None:
            self._syncer.close()
        if self._file is not None:
            self._file.close()
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
        if self._file is None:
            return
        try:
            self._file.append(data)
        except OSError as error:
            self._fail(error)
            return
        self.written += len(data)
        self._segments[self._newest].size += len(data)
        if self._syncer is not None:
            self._syncer.want(self._file.descriptor, self.written)

    def _begin(self, *, fresh: bool) -> None:
        """Start a new segment; with `fresh` it starts with all live entries, and older segments may be deleted.

        Raises:
            OSError: the segment cannot be written.
        """
        before = list(self._segments)
        number, file = self._folder.begin()
        batch, data = journal_pb2.Batch(fresh=True, unix_ms=self._clock_ms()), b""
        if fresh:
            batch.entries.extend(entry.record() for entry in self._book)
            data = frame(batch.SerializeToString())
            try:
                file.append(data)
            except OSError:
                file.close()
                self._folder.delete(number)
                raise
        if self._file is not None and self._syncer is None:
            self._file.close()
        self._file = file
        self._segments[number] = _Segment(file.size, self._clock_ms())
        self.written += file.size
        if self._syncer is not None:
            self._syncer.want(file.descriptor, self.written)
        if fresh:
            self._book.apply(batch, number)
            self._doomed = deque((self.written, each) for each in before)

    def _fail(self, error: OSError) -> None:
        """Handle a failed write, after which the current segment may end with an incomplete frame."""
        self.stats.failures += 1
        log.error("journal: cannot be written; requests are served without it", error=str(error))
        if self._syncer is None and self._file is not None:
            self._file.close()
        self._file = None
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
        log.info("journal: written again", requests=len(self._book))

    # ---------------------------------------------------------------- bounds

    def _tidy(self, now_ms: int) -> None:
        newest = self._segments[self._newest]
        is_old = now_ms - newest.born_ms > self._keep_ms and newest.size > len(HEADER)
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
        """Return whether so much of the space is stale that compaction is needed."""
        total = self.num_bytes
        if total <= self._max_bytes // 2:
            return False
        return total - self._book.num_bytes >= self._max_bytes // 4

    def _write_again(self, oldest: int, now_ms: int) -> None:
        """Copy some entries of the oldest segment to the newest segment."""
        batch = journal_pb2.Batch(unix_ms=now_ms)
        size = 0
        for entry in self._book:
            if entry.segment > oldest or size >= _AGAIN_BYTES:
                break
            batch.entries.append(entry.record())
            size += entry.size
        if batch.entries:
            self._book.apply(batch, self._newest)
            self._write(frame(batch.SerializeToString()))

    def _forget(self, oldest: int, now_ms: int) -> None:
        """Drop the entries of the oldest segment."""
        numbers = [entry.number for entry in itertools.takewhile(lambda entry: entry.segment <= oldest, self._book)]
        if numbers:
            self.stats.forgotten += len(numbers)
            log.warning("journal: full; its oldest requests were dropped from it", requests=len(numbers))
            batch = journal_pb2.Batch(unix_ms=now_ms, dropped=to_column(numbers))
            self._book.apply(batch, self._newest)
            self._write(frame(batch.SerializeToString()))


def _as_restored(book: Book) -> Book:
    """Mark all recovered entries as ended, because the core treats them as ended."""
    for entry in book:
        entry.prepared = None
        if entry.live:
            entry.live, entry.ended_ms = False, book.last_ms
    return book
