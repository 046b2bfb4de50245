"""The file of answers, which is also the record of what is done.

An answer is one line, written in one go behind everything else, so a run that is killed leaves whole lines and at most
one piece of a line at the end; the next run cuts that piece off and goes on. A lock keeps a second run off the file
meanwhile.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire.batch.jobs import BatchError, id_of_answer


class Journal:
    """An open file of answers."""

    def __init__(self, path: Path) -> None:
        """Opens the file, new or left by an earlier run.

        Raises:
            BatchError: another run writes to it, or it holds something else.
            OSError: it cannot be opened.
        """
        self._path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BatchError(f"{path}: another run is writing to it; wait for its end or name another file") from None
        try:
            self.done = self._read()
        except BatchError:
            self._file.close()
            raise

    def append(self, answer: dict[str, Any]) -> None:
        """Adds an answer; it survives this process as soon as the call returns."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        while line:
            line = line[os.write(self._file.fileno(), line) :]
        self.done.add(id_of_answer(answer))

    def close(self) -> None:
        """Makes the answers survive a loss of power, too, and lets others at the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> set[str]:
        done: set[str] = set()
        end = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                os.ftruncate(self._file.fileno(), end)
                break
            try:
                done.add(id_of_answer(json.loads(line)))
            except (ValueError, TypeError, KeyError):
                raise BatchError(f"{self._path}:{number}: is no answer of a batch; name another file") from None
            end += len(line)
        return done
