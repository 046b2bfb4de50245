"""A process's pulse: proof, for whoever started it, that its main loop still turns.

A process may be there and yet be of no use: stopped, or caught in a loop or a kernel that never ends. No thread of its
own can say so. So its loop touches a file now and then, and the supervisor looks at the file's time. The file comes to
be with the first beat: a process that still loads its model has no pulse yet and is not judged by it. Once the process
has done what it is there for, the file is no longer empty: a death after that is no failure to start.
"""

import os
import time
from pathlib import Path

ENVIRONMENT = "QUIRE_PULSE_FILE"
"""Names the file to the process."""
_EVERY_S = 0.25


class Pulse:
    """The process's side; does nothing in a process that nobody watches."""

    def __init__(self) -> None:
        # Taken out, so that processes which this one starts do not beat for it.
        path = os.environ.pop(ENVIRONMENT, "")
        self._path = Path(path) if path else None
        self._next = 0.0
        self._served = False

    def beat(self) -> None:
        """To be called at every turn of the loop; it costs next to nothing."""
        if self._path is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + _EVERY_S
        try:
            self._path.touch()
        except OSError:
            self._path = None  # the supervisor has gone, folder and all

    def served(self) -> None:
        """The process has done a first piece of its work."""
        if self._served or self._path is None:
            return
        self._served = True
        try:
            self._path.write_text("served")
        except OSError:
            self._path = None
