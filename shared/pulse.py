"""Pulse of a process: shows its supervisor that its main loop still runs.

A process may be alive and still hang: stopped, or in a loop or a kernel that never ends. No separate thread can detect
that. So the main loop touches a file regularly, and the supervisor checks the file's time. The first beat creates the
file, so a process that still loads its model is not judged. After its first completed work the file is not empty; a
later death does not count as a failure to start.

`quire_server.probe` reads it as the probe of a container.
"""

import os
import time
from pathlib import Path

ENVIRONMENT = "QUIRE_PULSE_FILE"
"""Variable that names the file."""
_EVERY_S = 0.25
"""Minimum interval of touches, seconds."""


class Pulse:
    """Pulse of this process; does nothing without a supervisor."""

    def __init__(self) -> None:
        # Remove the variable, so that child processes do not touch the file.
        path = os.environ.pop(ENVIRONMENT, "")
        self._path = Path(path) if path else None
        self._next = 0.0
        self._served = False

    def beat(self) -> None:
        """Touch the file, at most every `_EVERY_S`. Call it in every turn of the main loop; it is cheap."""
        if self._path is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + _EVERY_S
        try:
            self._path.touch()
        except OSError:
            self._path = None  # The supervisor has exited and removed the folder.

    def served(self) -> None:
        """Record that the process has completed some work."""
        if self._served or self._path is None:
            return
        self._served = True
        try:
            self._path.write_text("served", "utf-8")
        except OSError:
            self._path = None
