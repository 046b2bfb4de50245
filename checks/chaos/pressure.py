"""Pressure from other programs on the machine: busy processes and a disk that fills up."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_FULL_S, _FREE_S = 8.0, 12.0
"""How long the disk is full, and how long it then has free space."""
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"
"""Program that computes until its parent ends."""
_PIECE = b"\0" * 65536


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Let `count` processes compute all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Alternately fill the file system of a folder and free the space again."""
    ended = threading.Event()
    filler = threading.Thread(target=_fill_and_free, args=(folder, ended))
    filler.start()
    try:
        yield
    finally:
        ended.set()
        filler.join()


def _fill_and_free(folder: Path, ended: threading.Event) -> None:
    """Keep the disk full for a time, also if others delete files, and then delete the own file."""
    path = folder / "filler"
    while not ended.wait(_FREE_S):
        with path.open("wb", buffering=0) as file:
            for _ in range(int(_FULL_S / 0.1)):
                _fill(file.fileno())
                if ended.wait(0.1):
                    break
        path.unlink()


def _fill(file: int) -> None:
    try:
        while os.write(file, _PIECE):
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
