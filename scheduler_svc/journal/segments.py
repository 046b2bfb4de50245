"""Segments: files of batches, each stored as a frame with a checksum.

The checksum detects an incomplete frame. The writer does not continue a file after a failed write, so the reader
ignores the rest of a file from the first incomplete frame on.
"""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.quire.journal.v1 import journal_pb2

_HEADER = b"QUIREJ\x00\x01"
"""File header; its last byte is the version of the frame format. Frames contain Protobuf messages."""
_FRAME = struct.Struct("<II")
_SUFFIX = ".journal"
_LOCK = "lock"


class JournalInUseError(OSError):
    """Another process uses the journal folder."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Content of a segment file."""

    number: int
    batches: list[journal_pb2.Batch]
    size: int
    """Size of the file in bytes."""
    left_out: int
    """Bytes at the end of the file that are not a complete frame."""


def frame(payload: bytes) -> bytes:
    """Return a payload as a frame: its length, its checksum, and the payload."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes, position: int) -> Iterator[tuple[bytes, int]]:
    """Yield the payloads of frames, each with the position after it, up to the first incomplete or damaged frame."""
    while position + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, position)
        payload = data[position + _FRAME.size : position + _FRAME.size + length]
        if not length or len(payload) < length or zlib.crc32(payload) != checksum:
            return
        position += _FRAME.size + length
        yield payload, position


def read_segment(data: bytes, number: int = 0) -> Segment:
    """Return the batches of a file, up to the first incomplete frame."""
    batches: list[journal_pb2.Batch] = []
    position = 0
    if data[: len(_HEADER)] == _HEADER:
        position = len(_HEADER)
        for payload, end in frames(data, position):
            try:
                batches.append(journal_pb2.Batch.FromString(payload))
            except DecodeError:
                break
            position = end
    return Segment(number, batches, len(data), len(data) - position)


class Folder:
    """Folder with the segments of a journal, locked by one process.

    Raises:
        JournalInUseError: another process has the lock.
        OSError: the folder cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalInUseError(
                errno.EWOULDBLOCK, "another scheduler uses this journal folder", str(path)
            ) from None

    def numbers(self) -> list[int]:
        """Return the numbers of all segments, oldest first."""
        found = (path.name.removesuffix(_SUFFIX) for path in self._path.glob(f"*{_SUFFIX}"))
        return sorted(int(name) for name in found if name.isdecimal())

    def read(self, number: int) -> Segment:
        """Read a segment."""
        return read_segment(self._file(number).read_bytes(), number)

    def begin(self, number: int) -> int:
        """Create a segment; return a file descriptor for `append`."""
        descriptor = os.open(self._file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            append(descriptor, _HEADER)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def delete(self, number: int) -> None:
        """Delete a segment."""
        self._file(number).unlink(missing_ok=True)

    def sync(self) -> None:
        """Sync the folder, so that the names of new files are durable."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def _file(self, number: int) -> Path:
        return self._path / f"{number:012d}{_SUFFIX}"


HEADER_BYTES = len(_HEADER)


def append(descriptor: int, data: bytes) -> None:
    """Write all of `data`.

    Raises:
        OSError: not all of it was written, for example because the disk is full.
    """
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
