"""Segments of the journal: files of batches, one batch per frame.

The reader ignores the rest of a file from the first incomplete frame on.
"""

from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.quire.journal.v1 import journal_pb2
from scheduler_svc.segments import SegmentFolder, frames

HEADER = b"QUIREJ\x00\x01"
"""File header; its last byte is the version of the frame format. Frames contain Protobuf messages."""
SUFFIX = ".journal"


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
    """Return all segments of a folder, oldest first."""
    return [read_segment(folder.file(number).read_bytes(), number) for number in folder.numbers()]


def read_segment(data: bytes, number: int = 0) -> Segment:
    """Return the batches of a file, up to the first incomplete frame."""
    batches: list[journal_pb2.Batch] = []
    position = 0
    if data[: len(HEADER)] == HEADER:
        position = len(HEADER)
        for payload, end in frames(data, position):
            try:
                batches.append(journal_pb2.Batch.FromString(payload))
            except DecodeError:
                break
            position = end
    return Segment(number, batches, len(data), len(data) - position)
