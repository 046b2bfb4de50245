"""Detects a hanging process: its pulse (`shared.pulse`) has stopped. Pure except for reading the file's time.

Time is counted in checks, not read from a clock. When the machine sleeps or the supervisor itself is stopped, every
pulse is old although no process hangs.
"""

from pathlib import Path

CHECK_INTERVAL_S = 0.5
"""Interval of checks, seconds."""


class Watchdog:
    """Watchdog of one child."""

    def __init__(self, path: Path, patience_s: float) -> None:
        """Delete the pulse file of an earlier child process.

        Args:
            path: the pulse file, which the child process touches regularly.
            patience_s: maximum time without a pulse, seconds; 0 for no limit.
        """
        self._path = path
        self._patience_s = patience_s
        self._last_beat = 0
        self._silent_checks = 0
        path.unlink(missing_ok=True)

    @property
    def has_served(self) -> bool:
        """Whether this child has completed some work."""
        try:
            return self._path.stat().st_size > 0
        except OSError:
            return False

    def check(self) -> bool:
        """Return whether the process hangs; call it every `CHECK_INTERVAL_S`."""
        try:
            beat = self._path.stat().st_mtime_ns
        except OSError:
            return False  # The process has sent no pulse yet.
        if beat != self._last_beat:
            self._last_beat, self._silent_checks = beat, 0
            return False
        self._silent_checks += 1
        return 0 < self._patience_s < self._silent_checks * CHECK_INTERVAL_S
