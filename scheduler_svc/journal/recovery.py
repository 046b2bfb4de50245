"""Recovery: reads the journal of an earlier process and turns it into an event for the core."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import Log
from scheduler_svc.frontend.link import UnusableSubmissionError, arrival, from_stream_end
from scheduler_svc.journal.book import Book, Entry
from scheduler_svc.journal.segments import Segment, read_folder
from scheduler_svc.segments import SegmentFolder
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


def to_log(entry: Entry) -> Log | None:
    """Return the core's log of an entry; None if the entry is invalid."""
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
