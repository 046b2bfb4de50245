"""Private folder for the sockets of one service, removed at the end."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_PATH_BYTES = 107 - len("/frontends")
"""Maximum length of the folder's path: a Unix socket's path has at most 107 bytes on Linux, and ZeroMQ truncates longer
ones silently.
"""


@contextmanager
def runtime_dir() -> Iterator[Path]:
    """Create a folder that only this user may enter; remove it when the `with` block ends."""
    path = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(str(path).encode()) > _MAX_PATH_BYTES:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="quire-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
