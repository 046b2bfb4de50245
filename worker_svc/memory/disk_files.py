"""Block files: one file per KV block on disk, for one worker with one model.

A file has a header and the block's bytes in every layer, as in host memory. The header names the format, the identity
of the model and of the layout, the cache scope (as a hash), the key of the block, and a checksum of the bytes. A file
is used only if all of these are as expected and the checksum is correct. Other files with such a name are deleted,
because the folder belongs to Quire. Files with other names stay.

A file is complete when it gets its name. Its number is a *slot*: writing to a slot replaces the slot's file. Nothing is
synced: after a power failure, checksums detect files whose bytes were lost.

The folder is a numbered subfolder of the configured one. It is locked, so that several workers may share the setting,
and a worker that restarts finds its files.
"""

import contextlib
import enum
import errno
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shared.folder_lock import FolderInUseError, lock_folder
from shared.kv_sizes import DISK_HEADER_BYTES as HEADER_BYTES
from shared.prefix_keys import KEY_BYTES
from worker_svc.interface.disk import DiskBlock

FORMAT = 1
_MAX_FOLDERS = 64
_MAGIC = b"QuireKV\0"
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}sI")
"""Magic, format, whether the block is a first one, bytes of the block, identity, root, key, their checksum. The
checksum of the header follows.
"""
_CHECKSUM = struct.Struct("<I")
_NAME = re.compile(r"([0-9a-f]{8})\.(kv|tmp)")


class Refusal(enum.StrEnum):
    """Reason why a file is not used."""

    UNFINISHED = "unfinished"
    """The worker died while it wrote the file."""
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    """A checksum is wrong."""
    FORMAT = "format"
    """Another release wrote the file."""
    FOREIGN = "foreign"
    """The block is from another model, data type or layout."""
    STALE = "stale"
    """The file contains another block than expected, or its number is too large, or the block has another file."""
    UNREADABLE = "unreadable"
    """The system reported an error."""


class RefusedFileError(Exception):
    """A file must not be used."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


class BlockFiles:
    """The files of one worker. Not safe for use by several threads."""

    def __init__(self, folder: Path, *, num_slots: int, block_bytes: int, identity: bytes) -> None:
        """Lock a subfolder. No file is read.

        Args:
            folder: the configured folder; created if it does not exist.
            num_slots: number of files, at most `shared.kv_sizes.MAX_DISK_BLOCKS`.
            block_bytes: bytes of a block.
            identity: hash of the model and of the layout of its blocks, `KEY_BYTES` long.

        Raises:
            FolderInUseError: other workers use all subfolders.
            OSError: the folder cannot be created or written.
        """
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.refused: Counter[str] = Counter()
        """Number of refused files by reason. The caller clears it after each report."""
        self._identity = identity
        self._folder, self._lock = _first_free(folder)
        os.chmod(self._folder, 0o700)

    @property
    def folder(self) -> Path:
        """The locked subfolder."""
        return self._folder

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def scan(self) -> Iterator[DiskBlock]:
        """Yield the blocks of earlier runs, without reading their bytes; delete the files that cannot be used."""
        known: set[bytes] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None or not entry.is_file(follow_symlinks=False):
                    continue
                slot = int(match[1], 16)
                try:
                    block = self._usable(slot, unfinished=match[2] == "tmp")
                    if block.key in known:
                        raise RefusedFileError(Refusal.STALE)
                except RefusedFileError as error:
                    self._refuse(Path(entry.path), error.reason)
                    continue
                known.add(block.key)
                yield block

    def write(self, block: DiskBlock, content: memoryview) -> None:
        """Write a block's file; `content` has `block_bytes` bytes.

        Raises:
            OSError: the file was not written, for example because the disk is full. No file of this slot is left.
        """
        path, unfinished = self._path(block.slot), self._path(block.slot, "tmp")
        # Delete first, so that there are never more bytes than agreed.
        path.unlink(missing_ok=True)
        unfinished.unlink(missing_ok=True)
        header = _header(block, self._identity, len(content), zlib.crc32(content))
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _write_all(descriptor, header, content)
            finally:
                os.close(descriptor)
            os.rename(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """Read a block's bytes; `into` has `block_bytes` bytes, which are invalid after an error.

        Raises:
            RefusedFileError: the file does not contain this block. It was deleted and counted.
        """
        path = self._path(block.slot)
        try:
            self._read(path, block, into)
        except RefusedFileError as error:
            self._refuse(path, error.reason)
            raise
        except OSError:
            self._refuse(path, Refusal.UNREADABLE)
            raise RefusedFileError(Refusal.UNREADABLE) from None

    def clear(self) -> None:
        """Delete all files of blocks.

        Raises:
            OSError: a file could not be deleted. All others are deleted.
        """
        failure: OSError | None = None
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    try:
                        os.unlink(entry.path)
                    except OSError as error:
                        failure = failure or error
        if failure is not None:
            raise failure

    def _usable(self, slot: int, *, unfinished: bool) -> DiskBlock:
        if unfinished:
            raise RefusedFileError(Refusal.UNFINISHED)
        if slot >= self.num_slots:
            raise RefusedFileError(Refusal.STALE)
        try:
            descriptor = os.open(self._path(slot), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                header, size = os.pread(descriptor, HEADER_BYTES, 0), os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        except OSError:
            raise RefusedFileError(Refusal.UNREADABLE) from None
        block, _ = self._checked(slot, header, size)
        return block

    def _read(self, path: Path, block: DiskBlock, into: memoryview) -> None:
        header = bytearray(HEADER_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            size = os.fstat(descriptor).st_size
            num_read = os.preadv(descriptor, [header, into], 0)
            while HEADER_BYTES <= num_read < HEADER_BYTES + len(into):
                more = os.preadv(descriptor, [into[num_read - HEADER_BYTES :]], num_read)
                if not more:
                    break
                num_read += more
        finally:
            os.close(descriptor)
        found, checksum = self._checked(block.slot, bytes(header[:num_read]), size)
        if found != block:
            raise RefusedFileError(Refusal.STALE)
        if num_read != HEADER_BYTES + len(into):
            raise RefusedFileError(Refusal.TRUNCATED)
        if zlib.crc32(into) != checksum:
            raise RefusedFileError(Refusal.DAMAGED)

    def _checked(self, slot: int, header: bytes, size: int) -> tuple[DiskBlock, int]:
        """Return the block that a header describes, and the checksum of its bytes; `size`: bytes of the file."""
        if len(header) < HEADER_BYTES:
            raise RefusedFileError(Refusal.TRUNCATED)
        magic, version, is_first, block_bytes, identity, root, key, checksum = _HEADER.unpack_from(header)
        if magic != _MAGIC:
            raise RefusedFileError(Refusal.DAMAGED)
        if version != FORMAT:
            raise RefusedFileError(Refusal.FORMAT)
        if _CHECKSUM.unpack_from(header, _HEADER.size) != (zlib.crc32(header[: _HEADER.size]),):
            raise RefusedFileError(Refusal.DAMAGED)
        if identity != self._identity or block_bytes != self.block_bytes:
            raise RefusedFileError(Refusal.FOREIGN)
        if size != HEADER_BYTES + block_bytes:
            raise RefusedFileError(Refusal.TRUNCATED)
        return DiskBlock(slot, key, root, bool(is_first)), checksum

    def _refuse(self, path: Path, reason: Refusal) -> None:
        self.refused[reason.value] += 1
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _path(self, slot: int, suffix: str = "kv") -> Path:
        return self._folder / f"{slot:08x}.{suffix}"


def _first_free(folder: Path) -> tuple[Path, int]:
    for number in range(_MAX_FOLDERS):
        path = folder / f"worker-{number}"
        with contextlib.suppress(FolderInUseError):
            return path, lock_folder(path, "worker")
    raise FolderInUseError(errno.EWOULDBLOCK, f"{_MAX_FOLDERS} other workers use this folder", str(folder))


def _header(block: DiskBlock, identity: bytes, block_bytes: int, checksum: int) -> bytes:
    fields = _HEADER.pack(_MAGIC, FORMAT, block.is_first, block_bytes, identity, block.root, block.key, checksum)
    return (fields + _CHECKSUM.pack(zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def _write_all(descriptor: int, header: bytes, content: memoryview) -> None:
    written = os.writev(descriptor, [header, content])
    if written < HEADER_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while written < HEADER_BYTES + len(content):
        more = os.write(descriptor, content[written - HEADER_BYTES :])
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more
