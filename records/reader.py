"""Reads the segments of a record."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protos.quire.record.v1 import record_pb2 as pb
from records.decoding import Decoder, Opening
from records.values import Entry
from scheduler_svc.recorder.segments import FORMAT_VERSION, SegmentReader, UnreadableRecordError, paths


class OtherFormatError(UnreadableRecordError):
    """A segment has another format version."""


@dataclass(slots=True)
class Segment:
    """One segment; iterating over a segment yields its entries."""

    path: Path
    opening: Opening
    snapshot: bytes = b""
    """The core's state at the opening; empty if the core was new, or the snapshot is missing or not complete."""
    may_vanish: bool = False
    """Whether a recorder may delete the file before it is read; the segment then has no entries."""
    left_out: int = 0
    """After iteration: bytes at the end of the file that are not a complete frame."""

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        reader, decoder = SegmentReader(self.path), Decoder()
        try:
            for batch in reader.batches():
                if batch.HasField("opening"):
                    decoder.opening(batch)
                yield from decoder.entries(batch)
        except FileNotFoundError:
            if not self.may_vanish:
                raise
        self.left_out = reader.left_out


def read(place: Path) -> list[Segment]:
    """Return the segments in a folder, oldest first, or the one segment in a file; skip empty segments.

    Segments that the recorder deletes during reading are skipped too. If the folder has segments from this release,
    segments that an upgrade left behind are also skipped.

    Raises:
        UnreadableRecordError: a file is not a record, or all segments have another format version.
        OSError: a file cannot be read.
    """
    found = []
    other: OtherFormatError | None = None
    may_vanish = place.is_dir()
    for path in paths(place):
        try:
            segment = _open(path)
        except FileNotFoundError:
            if not may_vanish:
                raise
            continue
        except OtherFormatError as error:
            other = error
            continue
        if segment is not None:
            segment.may_vanish = may_vanish
            found.append(segment)
    if other is not None and not found:
        raise other
    return found


def _open(path: Path) -> Segment | None:
    segment: Segment | None = None
    parts: list[bytes] = []
    is_complete = False
    for batch in SegmentReader(path).batches():
        if segment is None:
            segment = Segment(path, _opening(path, batch))
            if segment.opening.fresh:
                return segment
        parts.append(batch.snapshot)
        is_complete |= batch.snapshot_complete
        if is_complete:
            break
    if segment is not None and is_complete:
        segment.snapshot = b"".join(parts)
    return segment


def _opening(path: Path, batch: pb.Batch) -> Opening:
    opening = batch.opening
    if opening.version != FORMAT_VERSION:
        what = f"written by release {opening.release} in format {opening.version}; this release reads {FORMAT_VERSION}"
        raise OtherFormatError(f"{path}: {what}; use that release to read it")
    return Decoder().opening(batch)
