"""Mirror: the journal folder of a standby, which gets the bytes of the leader's segments.

The first copy of the journal is written to a subfolder. When it is complete, its segments move behind the older ones of
this scheduler, which are then deleted. A leader that dies during the first copy therefore costs nothing that the
standby had before. The first segment begins with a batch that makes all older batches obsolete.

The mirror also applies the journal to a book, so that a standby that takes over need not read its folder.
"""

import os
import shutil
from pathlib import Path

from protos.quire.journal.v1 import journal_pb2
from protos.quire.journal.v1.replication_pb2 import JournalPart
from scheduler_svc.journal.recovery import Following, Found
from scheduler_svc.journal.segments import HEADER, SUFFIX, Segment, open_folder
from scheduler_svc.segments import SegmentFile, SegmentFolder, files, frame

_INCOMING = "incoming"


class GapError(ValueError):
    """A part does not follow the last one."""


class Mirror:
    """Writer of the folder of a standby.

    Args:
        path: the folder; created if it does not exist.
        syncs: whether each part is on the disk before it is acknowledged.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, path: Path, *, syncs: bool) -> None:
        self._path, self._syncs = path, syncs
        self._folder: SegmentFolder = open_folder(path)
        self._file: SegmentFile | None = None
        self._numbers: dict[int, int] = {}
        """Numbers of the segments here, by the leader's numbers, oldest first."""
        self._segment, self._offset = 0, 0
        self._following = Following()
        """Content of the copy that is being written."""
        self._waiting: list[tuple[int, bytes]] = []
        """(segment to begin, or 0; data) that `apply` has not applied to `_following` yet."""
        self._found: Found | None = None
        """Content of the folder at the last `start over`; None if it was never read."""
        self.is_complete = False
        """Whether the folder has the whole journal of the leader, up to the last part."""
        self._drop_incoming()

    def write(self, part: JournalPart) -> None:
        """Write a part.

        Raises:
            GapError: the part does not follow the last one; ask the leader to start over.
            OSError: it cannot be written.
        """
        if part.starts_over:
            self._start_over()
        if part.segment != self._segment:
            if part.offset or part.segment < self._segment or not (part.starts_over or self._segment):
                raise GapError(f"segment {part.segment} at {part.offset} follows {self._segment}")
            self._begin(part.segment)
        elif part.offset != self._offset:
            raise GapError(f"segment {part.segment}: part at {part.offset}, expected {self._offset}")
        assert self._file is not None
        # A new file has its header.
        skipped = max(0, len(HEADER) - part.offset)
        if len(part.data) > skipped:
            self._file.append(part.data[skipped:])
            self._waiting.append((0, part.data[skipped:]))
        self._offset += len(part.data)
        if self._syncs:
            os.fdatasync(self._file.descriptor)
        if part.is_complete:
            if not self.is_complete:
                self._promote()
            self._delete_before(part.oldest_segment)

    def abandon(self) -> None:
        """Delete a copy that is not complete, because it cannot be continued. This frees its disk space."""
        if not self.is_complete:
            self._close_file()
            self._drop_incoming()

    def apply(self) -> None:
        """Apply the parts that were written to the book. This is slow, so acknowledge the parts before."""
        for segment, data in self._waiting:
            if segment:
                self._following.begin(segment)
            self._following.feed(data)
        self._waiting.clear()

    def found(self) -> Found | None:
        """Return the content of the folder; None if it must be read."""
        if not self.is_complete:
            return self._found
        self.apply()
        sizes = {number: self._folder.file(number).stat().st_size for number in self._numbers.values()}
        return Found(self._following.book, [Segment(number, [], size, 0) for number, size in sizes.items()])

    def close(self) -> None:
        """Close all files and release the folder."""
        self._close_file()
        self._drop_incoming()
        self._folder.close()

    def _start_over(self) -> None:
        self._found = self.found()
        self._following = Following()
        self._waiting.clear()
        self._close_file()
        self._drop_incoming()
        self._numbers.clear()
        self._segment, self._offset, self.is_complete = 0, 0, False
        (self._path / _INCOMING).mkdir(mode=0o700)

    def _begin(self, segment: int) -> None:
        is_first = not self._numbers
        self._close_file()
        if self.is_complete:
            self._numbers[segment], self._file = self._folder.begin()
        else:
            self._numbers[segment] = segment
            self._file = SegmentFile(self._path / _INCOMING / f"{segment:012d}{SUFFIX}", HEADER)
        self._waiting.append((self._numbers[segment], b""))
        if is_first:
            self._file.append(frame(journal_pb2.Batch(fresh=True).SerializeToString()))
        self._segment, self._offset = segment, 0

    def _promote(self) -> None:
        """Move the complete copy into the folder, oldest segment first, and delete what it replaces."""
        self._found = None  # If this fails, the folder must be read, because it may have a part of the copy.
        replaced = self._folder.numbers()
        base = max(replaced, default=0)
        for index, path in enumerate(files(self._path / _INCOMING, SUFFIX), start=1):
            path.rename(self._folder.file(base + index))
            self._numbers[int(path.name.removesuffix(SUFFIX))] = base + index
        self.apply()
        self._following.rename(self._numbers)
        if self._syncs:
            self._folder.sync()
        for number in replaced:
            self._folder.delete(number)
        self._drop_incoming()
        self.is_complete = True

    def _delete_before(self, segment: int) -> None:
        for each in [each for each in self._numbers if each < segment]:
            self._folder.delete(self._numbers.pop(each))

    def _drop_incoming(self) -> None:
        shutil.rmtree(self._path / _INCOMING, ignore_errors=True)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
