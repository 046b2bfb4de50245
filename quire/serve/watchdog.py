"""Notices that a process hangs: its pulse (`shared.pulse`) has stopped. Pure but for looking at the file's time.

Time is counted in looks, not read from a clock: when the machine sleeps or the supervisor itself is stopped,
everybody's pulse is old, and nobody is to blame.
"""

from pathlib import Path

LOOK_EVERY_S = 0.5


class Watchdog:
    """Watches one life of one process."""

    def __init__(self, path: Path, patience_s: float) -> None:
        """Forgets an earlier life's pulse.

        Args:
            path: the file that the process touches.
            patience_s: how long a pulse may stop; 0: for ever.
        """
        self._path = path
        self._patience_s = patience_s
        self._last_beat = 0
        self._silent_looks = 0
        path.unlink(missing_ok=True)

    @property
    def has_served(self) -> bool:
        """Whether this life has done a first piece of its work."""
        try:
            return self._path.stat().st_size > 0
        except OSError:
            return False

    def look(self) -> bool:
        """Whether the process hangs; to be called every `LOOK_EVERY_S`."""
        try:
            beat = self._path.stat().st_mtime_ns
        except OSError:
            return False  # no pulse yet
        if beat != self._last_beat:
            self._last_beat, self._silent_looks = beat, 0
            return False
        self._silent_looks += 1
        return 0 < self._patience_s < self._silent_looks * LOOK_EVERY_S
