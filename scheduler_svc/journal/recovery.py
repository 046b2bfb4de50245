"""Recovery: reads the journal of an earlier process and turns it into an event for the core.

A standby reads the journal while it is written (`Following`), so that it has nothing to read when it takes over.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.journal.v1 import journal_pb2
from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import Log
from scheduler_svc.frontend.link import UnusableSubmissionError, arrival, from_stream_end
from scheduler_svc.journal.book import Book, Entry
from scheduler_svc.journal.segments import Segment, read_folder
from scheduler_svc.segments import SegmentFolder, frames
from shared.columns import MalformedColumnError
from shared.logging import get_logger

_NOBODY = b""
"""Placeholder for an unknown front end."""


@dataclass(frozen=True, slots=True)
class Found:
    """Content of a journal folder."""

    book: Book
    segments: list[Segment]

    def report(self) -> None:
        """Log a summary, and the incomplete segments."""
        log = get_logger()
        for segment in self.segments:
            if segment.left_out:
                log.warning(
                    "journal segment ends with an incomplete write; the rest is ignored",
                    segment=segment.number,
                    bytes_left_out=segment.left_out,
                    bytes_kept=segment.size - segment.left_out,
                )
        if self.segments:
            log.info(
                "journal read",
                requests=len(self.book),
                unfinished=sum(not entry.end for entry in self.book),
                segments=len(self.segments),
                bytes=sum(segment.size for segment in self.segments),
            )


def recover(folder: SegmentFolder) -> Found:
    """Read all segments of a folder."""
    return replay(read_folder(folder))


def replay(segments: list[Segment]) -> Found:
    """Apply the batches of all segments, oldest first."""
    book = Book()
    for segment in segments:
        for batch in segment.batches:
            try:
                book.apply(batch, segment.number)
            except (DecodeError, MalformedColumnError) as error:
                get_logger().error("journal: invalid batch ignored", segment=segment.number, error=str(error))
    return Found(book, segments)


class Following:
    """Book of a journal that is still written."""

    def __init__(self) -> None:
        self.book = Book()
        self._segment = 0
        self._rest = b""
        """Bytes of the segment that are not a complete frame yet."""

    def begin(self, segment: int) -> None:
        """Begin a segment. The bytes that follow are its content without the header."""
        self._segment, self._rest = segment, b""

    def feed(self, data: bytes) -> None:
        """Apply the batches that are complete with the next bytes of the segment, and decode their requests."""
        data, position = self._rest + data, 0
        for payload, end in frames(data, 0):
            position = end
            try:
                batch = journal_pb2.Batch.FromString(payload)
                self.book.apply(batch, self._segment)
            except (DecodeError, MalformedColumnError) as error:
                get_logger().error("journal: invalid batch ignored", segment=self._segment, error=str(error))
                continue
            for number in (*(each.number for each in batch.entries), *(each.number for each in batch.ended)):
                entry = self.book.get(number)
                if entry is not None:
                    entry.prepared = None
                    entry.prepared = to_log(entry)
        self._rest = data[position:]

    def rename(self, numbers: Mapping[int, int]) -> None:
        """Replace the numbers of the segments."""
        self._segment = numbers[self._segment]
        for entry in self.book:
            entry.segment = numbers[entry.segment]


def to_log(entry: Entry) -> Log | None:
    """Return the core's log of an entry; None if the entry is invalid."""
    if entry.prepared is not None:
        if not entry.live:
            return entry.prepared
        return Log(entry.prepared.spec, entry.tokens.tobytes(), tuple(entry.scores), end=None)
    submission = entry.whole_submission()
    try:
        spec = arrival(_NOBODY, submission, 0.0).spec
        end = from_stream_end(link_pb2.StreamEnd.FromString(entry.end), _NOBODY, spec) if entry.end else None
    except (UnusableSubmissionError, MalformedColumnError, DecodeError, KeyError, ValueError) as error:
        get_logger().error("journal: invalid request ignored", error=str(error))
        return None
    return Log(spec=spec, tokens=submission.token_ids, scores=tuple(entry.scores), end=end)


def to_event(book: Book, now_ms: int) -> ev.LogsRestored:
    """Return the event with all requests. Requests that were live in the earlier process may be resumed."""
    aged = []
    for entry in book:
        log = to_log(entry)
        if log is not None:
            aged.append((max(0.0, (now_ms - (entry.ended_ms or book.last_ms)) / 1000), log))
    aged.sort(key=lambda pair: -pair[0])
    return ev.LogsRestored(logs=tuple(aged))
