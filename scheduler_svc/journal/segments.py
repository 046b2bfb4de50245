"""Journal segments: files of batches, one batch per frame.

The reader ignores the rest of a file from the first incomplete frame on.
"""

from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.quire.journal.v1 import journal_pb2
from scheduler_svc.segments import SegmentFolder, frames

HEADER = b"QUIREJ\x00\x01"
"""File header; its last byte is the frame format version. Frames contain Protobuf messages."""
SUFFIX = ".journal"


class NewerJournalError(ValueError):
    """A segment has the format of a newer release."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Content of a segment file."""

    number: int
    batches: list[journal_pb2.Batch]
    size: int
    """Size of the file in bytes."""
    left_out: int
    """Bytes at the end of the file that are not a complete frame."""


def open_folder(path: Path) -> SegmentFolder:
    """Lock the folder of a journal.

    Raises:
        FolderInUseError: another process has the lock.
        OSError: the folder cannot be created or written.
    """
    return SegmentFolder(path, suffix=SUFFIX, header=HEADER)


def read_folder(folder: SegmentFolder) -> list[Segment]:
    """Return all segments of a folder, oldest first.

    Raises:
        NewerJournalError: a segment has the format of a newer release. Nothing in the folder is changed.
    """
    found = []
    for number in folder.numbers():
        path = folder.file(number)
        try:
            found.append(read_segment(path.read_bytes(), number))
        except NewerJournalError:
            raise NewerJournalError(f"{path} was written by a newer release") from None
    return found


def read_segment(data: bytes, number: int = 0) -> Segment:
    """Return the batches of a file, up to the first incomplete frame.

    Raises:
        NewerJournalError: the file has the format of a newer release.
    """
    batches: list[journal_pb2.Batch] = []
    position = 0
    head = data[: len(HEADER)]
    if len(head) == len(HEADER) and head[:-1] == HEADER[:-1] and head != HEADER:
        raise NewerJournalError(f"segment {number} was written by a newer release")
    if head == HEADER:
        position = len(HEADER)
        for payload, end in frames(data, position):
            try:
                batches.append(journal_pb2.Batch.FromString(payload))
            except DecodeError:
                break
            position = end
    return Segment(number, batches, len(data), len(data) - position)
