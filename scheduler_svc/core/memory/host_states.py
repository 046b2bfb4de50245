"""Places in a worker's host memory for the recurrent states of preempted requests, whose KV is in host blocks.

Checkpoints are at block boundaries, but a preempted request continues at its newest token. Its state is therefore saved
to a place of its own, and restored when the request is admitted again. The places are numbered after the worker's
checkpoints, so plans name them in the same columns.

Within a plan, the states of rows that leave are saved before admitted rows are restored. A place that a plan restores
from is therefore free only for later plans.
"""

from collections.abc import Iterable


class HostStates:
    """The places of one worker in one epoch."""

    def __init__(self, first: int, num_places: int) -> None:
        """Make the free places [first, first + num_places)."""
        self._first, self._num_places = first, num_places
        self._free = list(reversed(range(first, first + num_places)))
        self._released: list[tuple[int, int]] = []
        """Places that are free after a plan, each with the step of that plan, ascending."""

    def has_room(self, step: int) -> bool:
        """Return whether the plan of this step can save a state."""
        return bool(self._free) or (bool(self._released) and self._released[0][0] < step)

    def take(self, step: int) -> int:
        """Return a place for a state that the plan of this step saves; the caller has checked `has_room`."""
        while self._released and self._released[0][0] < step:
            self._free.append(self._released.pop(0)[1])
        return self._free.pop()

    def release(self, place: int, step: int) -> None:
        """Release a place after the plan of this step, which restores its state or is an earlier plan."""
        self._released.append((step, place))

    def validate(self, held: Iterable[int]) -> None:
        """Check that each place is free, released, or held by one request."""
        places = range(self._first, self._first + self._num_places)
        assert sorted([*self._free, *(place for _, place in self._released), *held]) == list(places)
        assert self._released == sorted(self._released, key=lambda each: each[0])
