"""What a journal says when nobody writes it any more, and what of it the core is given."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core import events as ev
from scheduler_svc.core.records import Log
from scheduler_svc.frontend_link import UnusableSubmissionError, arrival, from_stream_end
from scheduler_svc.journal.book import Book, Entry
from scheduler_svc.journal.segments import Folder, Segment
from shared.columns import MalformedColumnError
from shared.logging import get_logger

_NOBODY = b""
"""The front end of a request whose front end is not known."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in a folder."""

    book: Book
    segments: list[Segment]

    def report(self) -> None:
        """Says in the log what was found, and what made no sense."""
        log = get_logger()
        for segment in self.segments:
            if segment.left_out:
                log.warning(
                    "the journal's segment ends in the midst of a write; the rest is left out",
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


def recover(folder: Folder) -> Found:
    """Reads all of it."""
    return replay([folder.read(number) for number in folder.numbers()])


def replay(segments: list[Segment]) -> Found:
    """What segments say, oldest first."""
    book = Book()
    for segment in segments:
        for batch in segment.batches:
            try:
                book.apply(batch, segment.number)
            except (DecodeError, MalformedColumnError) as error:
                get_logger().error("a batch of the journal is left out", segment=segment.number, error=str(error))
    return Found(book, segments)


def to_log(entry: Entry) -> Log | None:
    """What the core keeps of such a request; None when no core can have written it."""
    submission = entry.whole_submission()
    try:
        request = arrival(_NOBODY, submission, 0.0)
        end = from_stream_end(link_pb2.StreamEnd.FromString(entry.end), request) if entry.end else None
    except (UnusableSubmissionError, MalformedColumnError, DecodeError, KeyError, ValueError) as error:
        get_logger().error("a request of the journal is left out", error=str(error))
        return None
    return Log(request=request, tokens=submission.token_ids, scores=tuple(entry.scores), end=end)


def to_event(book: Book, now_ms: int) -> ev.LogsRestored:
    """What the core is to know: what was live when the writer ended is over, and may come back."""
    aged = []
    for entry in book:
        log = to_log(entry)
        if log is not None:
            aged.append((max(0.0, (now_ms - (entry.ended_ms or book.last_ms)) / 1000), log))
    aged.sort(key=lambda pair: -pair[0])
    return ev.LogsRestored(logs=tuple(aged))
