"""A process's pulse: shows the supervisor that the process's main loop still runs.

A live process may hang because it is stopped, or is in a loop or a kernel that never ends. A separate thread cannot
detect this. Therefore the main loop touches a file regularly, and the supervisor checks the file's time. The first call
creates the file, so the supervisor does not kill a process that is still loading its model. After the process has
completed some work, the file is not empty, and a later death does not count as a failure to start.

The container probe `quire_server.probe` reads the same file.
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
        # Remove the variable, so that child processes do not write to the file.
        path = os.environ.pop(ENVIRONMENT, "")
        self._path = Path(path) if path else None
        self._next = 0.0
        self._served = False

    def beat(self) -> None:
        """Touch the file, at most every `_EVERY_S`. Call this in every iteration of the main loop; it is cheap."""
        if self._path is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + _EVERY_S
        try:
            self._path.touch()
        except OSError:
            self._path = None  # The supervisor has exited and deleted the folder.

    def served(self) -> None:
        """Record that the process has completed some work."""
        if self._served or self._path is None:
            return
        self._served = True
        try:
            self._path.write_text("served", "utf-8")
        except OSError:
            self._path = None
