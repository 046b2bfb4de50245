"""Results file, which also shows which requests are done.

Each result is one line, appended in one write. A killed run leaves complete lines and at most one partial line at the
end, which the next run removes before it continues. A lock prevents a second run from using the file.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire_server.batch.jobs import BatchError, id_of_answer


class Journal:
    """An open file of answers."""

    def __init__(self, path: Path) -> None:
        """Open the file, which may be new or left by an earlier run.

        Raises:
            BatchError: another run uses the file, or it contains something else.
            OSError: the file cannot be opened.
        """
        self._path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BatchError(f"{path}: in use by another run; wait until that run ends, or use another file") from None
        try:
            self.done = self._read()
        except BatchError:
            self._file.close()
            raise

    def append(self, answer: dict[str, Any]) -> None:
        """Append a result. Once the call returns, the result survives even if this process dies."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        while line:
            line = line[os.write(self._file.fileno(), line) :]
        self.done.add(id_of_answer(answer))

    def close(self) -> None:
        """Sync the answers to disk and release the lock."""
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
                raise BatchError(f"{self._path}:{number}: not a result of a batch; use another file") from None
            end += len(line)
        return done
