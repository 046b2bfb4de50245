"""Schedulers: the addresses of which one leads, for a worker or front end.

One address is tried at a time. Only the leader listens, so an address that does not respond soon is left for the next
one. A scheduler with a lower leader number than the highest known one was replaced, and is left too.
"""

from shared.config import addresses

_FIRST_S = 0.3
_LONGEST_S = 2.4


class Schedulers:
    """Addresses of a service's schedulers.

    Args:
        value: the addresses, separated by commas.
    """

    def __init__(self, value: str) -> None:
        self._addresses = addresses(value) or [value]
        self._current = 0
        self._tries = 0
        """Addresses that were tried since a scheduler responded."""
        self.highest = 0
        """Highest leader number of a scheduler that responded."""

    @property
    def address(self) -> str:
        """Address to connect to."""
        return self._addresses[self._current]

    @property
    def are_several(self) -> bool:
        return len(self._addresses) > 1

    @property
    def timeout_s(self) -> float:
        """Time after which an address that does not respond is left, in seconds.

        The time grows, because a scheduler that has just taken over may have much to do.
        """
        rounds: int = self._tries // len(self._addresses)
        return float(min(_FIRST_S * 2**rounds, _LONGEST_S))

    def leave(self) -> None:
        """Use the next address, because the present one is lost or does not respond."""
        self._current = (self._current + 1) % len(self._addresses)
        self._tries = min(self._tries + 1, 64)

    def accepts(self, leader_number: int) -> bool:
        """Return whether the scheduler with this number may lead; 0 if it has no number."""
        if 0 < leader_number < self.highest:
            return False
        self.highest = max(self.highest, leader_number)
        self._tries = 0
        return True
