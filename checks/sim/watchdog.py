"""Time limit for a simulated step: a core that does not return becomes a failure with its stack."""

import signal
import threading
from types import FrameType, TracebackType

MOST_STEP_S = 10.0
"""CPU time limit of one step. A step takes milliseconds."""


class HangError(Exception):
    """A step that has not returned within its time limit."""


class Watchdog:
    """Raises `HangError` in the code that runs when a step exceeds its time limit.

    The limit is CPU time, so a busy machine does not matter. Signals reach only the main thread, so a simulation in
    another thread has no limit.
    """

    def __enter__(self) -> "Watchdog":
        self._applies = threading.current_thread() is threading.main_thread()
        if self._applies:
            self._before = signal.signal(signal.SIGVTALRM, _raise)
        return self

    def step_begins(self) -> None:
        """Start the time of a step. The signal is repeated, in case that the first exception is ignored."""
        if self._applies:
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_STEP_S, MOST_STEP_S)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._applies:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise HangError(f"a step did not end within {MOST_STEP_S:g} s of CPU time")
