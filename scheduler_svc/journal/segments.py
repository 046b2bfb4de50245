"""Batches as frames in files, and where a file stops making sense.

A frame is there as a whole or not at all: its checksum says which. What follows a frame that is not whole was never
read by anybody, since nothing is written after a failed write, so a reader leaves the rest of the file out.
"""

import errno
import fcntl
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.quire.journal.v1 import journal_pb2

_HEADER = b"QUIREJ\x00\x01"
"""Ends with the version of the form of frames; what is in them is Protobuf's business."""
_FRAME = struct.Struct("<II")
_SUFFIX = ".journal"
_LOCK = "lock"


class JournalInUseError(OSError):
    """Another process writes this journal."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What a file holds."""

    number: int
    batches: list[journal_pb2.Batch]
    size: int
    """Bytes of the file."""
    left_out: int
    """Bytes at its end that are no whole frame."""


def frame(batch: journal_pb2.Batch) -> bytes:
    """A batch as it stands in a file."""
    payload = batch.SerializeToString()
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def read_segment(data: bytes, number: int = 0) -> Segment:
    """The batches of a file, up to the first frame that is not whole."""
    batches: list[journal_pb2.Batch] = []
    position = 0
    if data[: len(_HEADER)] == _HEADER:
        position = len(_HEADER)
        while position + _FRAME.size <= len(data):
            length, checksum = _FRAME.unpack_from(data, position)
            begin = position + _FRAME.size
            payload = data[begin : begin + length]
            if not length or len(payload) < length or zlib.crc32(payload) != checksum:
                break
            try:
                batches.append(journal_pb2.Batch.FromString(payload))
            except DecodeError:
                break
            position = begin + length
    return Segment(number, batches, len(data), len(data) - position)


class Folder:
    """The files of a journal; one process at a time.

    Raises:
        JournalInUseError: another process has it.
        OSError: it cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalInUseError(errno.EWOULDBLOCK, "another scheduler writes the journal here", str(path)) from None

    def numbers(self) -> list[int]:
        """The segments, oldest first."""
        found = (path.name.removesuffix(_SUFFIX) for path in self._path.glob(f"*{_SUFFIX}"))
        return sorted(int(name) for name in found if name.isdecimal())

    def read(self, number: int) -> Segment:
        """What a segment holds."""
        return read_segment(self._file(number).read_bytes(), number)

    def begin(self, number: int) -> int:
        """A new segment; a descriptor that appends to it."""
        descriptor = os.open(self._file(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            append(descriptor, _HEADER)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def delete(self, number: int) -> None:
        """A segment that nobody needs."""
        self._file(number).unlink(missing_ok=True)

    def sync(self) -> None:
        """Makes the names of new files last."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets others have it."""
        os.close(self._lock)

    def _file(self, number: int) -> Path:
        return self._path / f"{number:012d}{_SUFFIX}"


HEADER_BYTES = len(_HEADER)


def append(descriptor: int, data: bytes) -> None:
    """Writes all of it.

    Raises:
        OSError: not all of it was taken, because the disk is full, for example.
    """
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
