"""Flight record segments, and their ring in a folder.

A segment's payloads form one compressed stream, so nothing after a damaged frame can be read. Later frames would be
useless anyway, because their values are deltas to earlier ones.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.quire.record.v1 import record_pb2 as pb
from scheduler_svc.segments import SegmentFile, SegmentFolder, files, frame, frames

FORMAT_VERSION = 5
SUFFIX = ".record"
_HEADER = b"QUIREF\x00\x01"
"""File header; its last byte is the frame format version."""
_LEVEL = 1
_MAX_BATCH = 1 << 28
"""Largest batch that a reader decompresses, bytes."""
_MAX_SEGMENT_BYTES = 8 << 20
"""Maximum size of a segment. Reading 8 MiB takes about 20 s, and explaining recent requests reads a whole segment."""


class UnreadableRecordError(ValueError):
    """A file is not a record, or has a newer version."""


class SegmentWriter:
    """Writer of one file."""

    def __init__(self, file: SegmentFile) -> None:
        self._file = file
        self._stream = zlib.compressobj(_LEVEL)

    @classmethod
    def create(cls, path: Path) -> "SegmentWriter":
        """Create a file outside a ring.

        Raises:
            OSError: the file exists or cannot be written.
        """
        return cls(SegmentFile(path, _HEADER))

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._file.size

    def write(self, batch: pb.Batch) -> None:
        """Append a batch.

        Raises:
            OSError: it was not written as a whole; the segment must not be continued.
        """
        payload = self._stream.compress(batch.SerializeToString()) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        self._file.append(frame(payload))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(slots=True)
class SegmentReader:
    """Reader of one file."""

    path: Path
    left_out: int = 0
    """Bytes at the end of the file that are not a complete frame; valid after `batches` has finished."""

    def batches(self) -> Iterator[pb.Batch]:
        """Yield the batches up to the first incomplete or damaged frame.

        Raises:
            UnreadableRecordError: the file is not a record, or of a newer version.
        """
        data = self.path.read_bytes()
        if len(data) < len(_HEADER) and _HEADER.startswith(data):
            # The writer was killed, or the disk was full.
            self.left_out = len(data)
            return
        if data[: len(_HEADER) - 1] != _HEADER[:-1]:
            raise UnreadableRecordError(f"{self.path}: not a flight record; use a file that ends in {SUFFIX}")
        if data[: len(_HEADER)] != _HEADER:
            raise UnreadableRecordError(f"{self.path}: written by a newer release; use that release to read it")
        stream, position = zlib.decompressobj(), len(_HEADER)
        for payload, end in frames(data, position):
            try:
                batch = pb.Batch.FromString(stream.decompress(payload, _MAX_BATCH))
            except (DecodeError, zlib.error):
                break
            position = end
            yield batch
        self.left_out = len(data) - position


class Ring:
    """A folder of segments with limited total size; locked by one process.

    Raises:
        FolderInUseError: another process has the lock.
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._folder = SegmentFolder(folder, suffix=SUFFIX, header=_HEADER)
        folder.chmod(0o700)
        self._sizes = {path: path.stat().st_size for path in self._folder.files()}
        self._current: Path | None = None

    @property
    def segment_bytes(self) -> int:
        """Size at which a new segment begins. The ring contains at least eight segments."""
        return min(self._max_bytes // 8, _MAX_SEGMENT_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes in all segments except the one being written."""
        return sum(self._sizes.values())

    def begin(self, previous: SegmentWriter | None) -> SegmentWriter:
        """Close the previous segment and create the next; delete the oldest segments beyond the limit."""
        if previous is not None:
            previous.close()
        if self._current is not None and self._current.exists():
            # A segment with a failed last write also takes up space.
            self._sizes[self._current] = self._current.stat().st_size
        self.make_room(2 * self.segment_bytes)
        number, file = self._folder.begin()
        self._current = self._folder.file(number)
        return SegmentWriter(file)

    def make_room(self, num_bytes: int) -> None:
        """Delete the oldest segments until `num_bytes` more bytes fit."""
        while self._sizes and self.num_bytes + num_bytes > self._max_bytes:
            oldest = next(iter(self._sizes))
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]

    def close(self) -> None:
        """Release the lock."""
        self._folder.close()


def paths(place: Path) -> list[Path]:
    """Return a folder's segments, oldest first, or the given file."""
    return files(place, SUFFIX) if place.is_dir() else [place]
