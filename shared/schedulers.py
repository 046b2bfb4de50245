"""Schedulers: the addresses of which one leads, for a worker or front end.

Only the leader listens. A worker or front end without a leader therefore sends Hello to all addresses at the same time
and stays with the first scheduler that responds. A scheduler with a lower leader number than the highest known one was
replaced, and is left.
"""

from shared.config import addresses


class Schedulers:
    """Addresses of a service's schedulers, and the highest leader number that is known.

    Args:
        value: the addresses, separated by commas.
    """

    def __init__(self, value: str) -> None:
        self.addresses = tuple(addresses(value)) or (value,)
        self.highest = 0
        """Highest leader number of a scheduler that responded."""

    @property
    def are_several(self) -> bool:
        return len(self.addresses) > 1

    def accepts(self, leader_number: int) -> bool:
        """Return whether the scheduler with this number may lead; 0 if it has no number."""
        if 0 < leader_number < self.highest:
            return False
        self.highest = max(self.highest, leader_number)
        return True
