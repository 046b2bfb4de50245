"""Places in a worker's host memory for recurrent states, whose KV is in host blocks or on the device.

* *Preempted requests.* Checkpoints are at block boundaries, but a preempted request continues at its newest token. Its
  state is therefore saved to a place of its own, and restored when the request is admitted again.
* *Cached prefixes.* The state of a checkpoint that leaves the device moves here, under the key of its last block. A
  request can begin with it if the KV of all tokens before is on the device or in host blocks. It remains here
  afterwards. The states of preempted requests replace the least recently used cached ones.

A cached state depends only on its key, so it may outlive the KV of its block: if the KV is computed again, the state is
useful again.

The places are numbered after the worker's checkpoints, so plans name them in the same columns. Plans run in order, and
a plan writes places before it reads any. A place that a plan reads or writes can therefore be written again only by a
later plan.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from shared.prefix_keys import KEY_BYTES, BlockKey


class _Cached(NamedTuple):
    """A cached state."""

    place: int
    num_blocks: int
    """Number of blocks of its sequence."""
    step: int
    """The newest step that reads or writes it."""


class StateCopy(NamedTuple):
    """The state of a checkpoint that a plan copies to host memory."""

    checkpoint: int
    place: int


class HostStates:
    """The places of one worker in one epoch."""

    def __init__(self, first: int, num_places: int) -> None:
        """Make the free places [first, first + num_places)."""
        self._first, self.num_places = first, num_places
        self._free = list(reversed(range(first, first + num_places)))
        self._released: list[tuple[int, int]] = []
        """Places that are free after a plan, each with the step of that plan, ascending."""
        self._cached: OrderedDict[BlockKey, _Cached] = OrderedDict()
        """The cached states, least recently used first."""
        self.num_stored = 0
        """Number of states of cached prefixes that were copied here."""
        self.num_loaded = 0
        """Number of rows that began with a cached state."""
        self.num_evicted = 0
        """Number of cached states whose place was needed."""

    @property
    def num_cached(self) -> int:
        """Number of places with the state of a cached prefix."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Number of places with the state of a preempted request."""
        return self.num_places - len(self._free) - len(self._released) - len(self._cached)

    # ---------------------------------------------------------------- preempted requests

    def has_room(self, step: int) -> bool:
        """Return whether the plan of this step can write a state to a further place."""
        return bool(self._free) or (bool(self._released) and self._released[0][0] < step) or self._can_evict(step)

    def take(self, step: int) -> int:
        """Return a place for a state that the plan of this step writes; the caller has checked `has_room`."""
        while self._released and self._released[0][0] < step:
            self._free.append(self._released.pop(0)[1])
        if not self._free:
            self._free.append(self._cached.popitem(last=False)[1].place)
            self.num_evicted += 1
        return self._free.pop()

    def release(self, place: int, step: int) -> None:
        """Release a place after the plan of this step, which restores its state or is an earlier plan."""
        self._released.append((step, place))

    # ---------------------------------------------------------------- cached prefixes

    def reach(self, keys: bytes, least: int, most: int) -> int:
        """Return how many blocks of a sequence a request can use because of a cached state.

        Args:
            keys: the joined keys of the sequence.
            least: number of blocks that it can use without the states here.
            most: number of leading blocks whose KV is on the device or in host memory.

        Returns:
            the number of blocks before the last cached state, or `least`.
        """
        counts: Iterable[int] = range(most, least, -1)
        if most - least > len(self._cached):  # Look up only lengths that a state has: prompts may have many blocks.
            lengths = {each.num_blocks for each in self._cached.values()}
            counts = sorted((length for length in lengths if least < length <= most), reverse=True)
        for count in counts:
            if keys[KEY_BYTES * (count - 1) : KEY_BYTES * count] in self._cached:
                return count
        return least

    def store(self, key: BlockKey, num_blocks: int, step: int) -> int | None:
        """Return the place for the state after a block, which the plan of this step writes.

        Args:
            key: the key of the block.
            num_blocks: number of blocks of its sequence up to this one.
            step: the step of the plan that is being made.

        Returns:
            None if the state is here already, or no place is left.
        """
        if self.use(key) or not self.has_room(step):
            return None
        place = self.take(step)
        self._cached[key] = _Cached(place, num_blocks, step)
        self.num_stored += 1
        return place

    def use(self, key: BlockKey) -> bool:
        """Mark the state after a block as used; return False if it is not here."""
        if key not in self._cached:
            return False
        self._cached.move_to_end(key)
        return True

    def load(self, key: BlockKey, step: int) -> int:
        """Return the place of a cached state, which a row begins with in the plan of this step."""
        self._cached[key] = loaded = self._cached[key]._replace(step=step)
        self._cached.move_to_end(key)
        self.num_loaded += 1
        return loaded.place

    def drop_cached(self) -> None:
        """Remove all cached states, because some of them may be wrong. No plan is being made."""
        self._free += [each.place for each in self._cached.values()]
        self._cached.clear()

    def _can_evict(self, step: int) -> bool:
        """Return whether the plan of this step may write to the place of the least recently used cached state."""
        # If this plan uses the oldest one, it uses all of them.
        oldest = next(iter(self._cached.values()), None)
        return oldest is not None and oldest.step < step

    def validate(self, held: Iterable[int]) -> None:
        """Check that each place is free, released, cached, or held by one request."""
        places = range(self._first, self._first + self.num_places)
        cached = [each.place for each in self._cached.values()]
        assert sorted([*self._free, *(place for _, place in self._released), *cached, *held]) == list(places)
        assert self._released == sorted(self._released, key=lambda each: each[0])
