"""Restart policy for children that die unexpectedly. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the process after a delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report that the service cannot start."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with exponential backoff, without limit once the service was ready.

    Before that, a process that exits by itself (a bad model path, a forbidden port) would fail again, so the service
    stops. A process killed by a signal (for example because memory ran out) gets a few more attempts.
    """

    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0
    steady_after_s: float = 30.0
    """Lifetime after which the backoff starts over, seconds."""
    chances_at_start: int = 3

    def after_death(self, *, exit_code: int, lived_s: float, deaths: int, was_ready: bool) -> Restart | GiveUp:
        """Decide what to do.

        Args:
            exit_code: exit code of the process, negative for a signal.
            lived_s: lifetime of the process, seconds.
            deaths: number of consecutive short-lived processes, this one included.
            was_ready: whether the service as a whole was ever ready.
        """
        if not was_ready and (exit_code >= 0 or deaths >= self.chances_at_start):
            return GiveUp()
        if lived_s >= self.steady_after_s:
            deaths = 1
        return Restart(min(self.first_delay_s * 2.0 ** min(deaths - 1, 30), self.longest_delay_s))
