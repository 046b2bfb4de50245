"""Lock of a folder, so that only one process uses it at a time."""

import errno
import fcntl
import os
from pathlib import Path

_LOCK = "lock"


class FolderInUseError(OSError):
    """Another process uses the folder."""


def lock_folder(path: Path, user: str) -> int:
    """Create a folder for this user only if it does not exist, and lock it.

    Args:
        path: the folder.
        user: kind of process that uses the folder, for the error.

    Returns:
        A file descriptor. The lock ends when it is closed, at the latest with the process.

    Raises:
        FolderInUseError: another process has the lock.
        OSError: the folder cannot be created or written.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise FolderInUseError(errno.EWOULDBLOCK, f"another {user} uses this folder", str(path)) from None
    return lock
