"""Segments: numbered files of checksummed frames, in a folder that one process has locked.

The journal and the flight record both consist of segments. A frame is written with one call and has a checksum, so that
a reader detects the first incomplete frame of a file. After a failed write, the writer begins a new file.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from shared.folder_lock import lock_folder

_FRAME = struct.Struct("<II")


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


def files(folder: Path, suffix: str) -> list[Path]:
    """Return the segments of a folder, oldest first."""
    found = (path for path in folder.glob(f"*{suffix}") if path.name.removesuffix(suffix).isdecimal())
    return sorted(found, key=lambda path: _number(path, suffix))


class SegmentFile:
    """A segment that is being written.

    Args:
        path: the file to create.
        header: its first bytes.

    Raises:
        OSError: the file exists or cannot be written; no file is left then.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.size = 0
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.append(header)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def append(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: not all of it was written, for example because the disk is full; do not continue the file.
        """
        if os.write(self.descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(data)

    def close(self) -> None:
        os.close(self.descriptor)


class SegmentFolder:
    """Folder of segments, locked by this process.

    Args:
        path: the folder; created if it does not exist.
        suffix: end of the names of its segments.
        header: first bytes of its segments.

    Raises:
        FolderInUseError: another process has the lock.
        OSError: the folder cannot be created or written.
    """

    def __init__(self, path: Path, *, suffix: str, header: bytes) -> None:
        self._path, self._suffix, self._header = path, suffix, header
        self._lock = lock_folder(path, "scheduler")

    def files(self) -> list[Path]:
        """Return its segments, oldest first."""
        return files(self._path, self._suffix)

    def numbers(self) -> list[int]:
        """Return the numbers of its segments, oldest first."""
        return [_number(path, self._suffix) for path in self.files()]

    def file(self, number: int) -> Path:
        return self._path / f"{number:012d}{self._suffix}"

    def begin(self) -> tuple[int, SegmentFile]:
        """Create the segment after the newest one; return its number and the open file.

        Raises:
            OSError: the segment cannot be written.
        """
        number = max(self.numbers(), default=0) + 1
        return number, SegmentFile(self.file(number), self._header)

    def delete(self, number: int) -> None:
        self.file(number).unlink(missing_ok=True)

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


def _number(path: Path, suffix: str) -> int:
    return int(path.name.removesuffix(suffix))
