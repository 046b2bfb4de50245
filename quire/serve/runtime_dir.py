"""A private folder for the sockets of one service, removed with everything in it at the end."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 107 - len("/frontends")
"""A Unix socket's path has at most 107 bytes on Linux, and ZeroMQ cuts a longer one silently."""


@contextmanager
def runtime_dir() -> Iterator[Path]:
    """A new folder that only this user may enter."""
    path = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(str(path).encode()) > _LONGEST:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
