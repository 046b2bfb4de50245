"""What follows from a child's unexpected death: a pure decision."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after a pause."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The service cannot start."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts with a growing pause, for ever; before the service was ever ready, hardly at all.

    A process that ends by itself before that (a bad model path, a port it may not use) has said why, and
    would say so again. One that a signal ended (the kernel, short of memory) gets a few more chances.
    """

    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0
    steady_after_s: float = 30.0
    """A process that lived so long starts over with the shortest pause."""
    chances_at_start: int = 3

    def after_death(self, *, exit_code: int, lived_s: float, deaths: int, was_ready: bool) -> Restart | GiveUp:
        """Decides.

        Args:
            exit_code: of the process, negative for a signal.
            lived_s: seconds between its start and its end.
            deaths: how often it died in a row, this time included, without living long.
            was_ready: whether the service as a whole was ever ready.
        """
        if not was_ready and (exit_code >= 0 or deaths >= self.chances_at_start):
            return GiveUp()
        if lived_s >= self.steady_after_s:
            deaths = 1
        return Restart(min(self.first_delay_s * 2.0 ** min(deaths - 1, 30), self.longest_delay_s))
