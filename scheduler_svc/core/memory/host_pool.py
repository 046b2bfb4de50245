"""Host pool: the blocks of a tier below the device, with reference counts and eviction like device blocks."""

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray, any_of
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.host_keys import HostKeys


class HostPool(BlockPool):
    """The host blocks, or the slots on disk, of one worker. Twins are evicted before other cached blocks."""

    def __init__(self, num_blocks: int, keys: HostKeys) -> None:
        super().__init__(num_blocks)
        self._content = self.keys = keys

    def _cache(self, blocks: IndexArray) -> None:
        twins = self.keys.twins[blocks]
        super()._cache(blocks[~twins])
        if any_of(twins):
            super()._cache(blocks[twins])
            self._cached.remove(blocks[twins])
            self._cached.prepend(blocks[twins])

    def lost_twins(self, blocks: IndexArray) -> None:
        """Record that the device no longer has the content of cached blocks; they were just used."""
        self.keys.twins[blocks] = False
        self.touch(blocks)

    def touch(self, blocks: IndexArray) -> None:
        """Record that blocks were just used."""
        idle = blocks[self._claims[blocks] < 0]
        if len(idle):
            self._cached.remove(idle)
            self._cached.append(idle)

    def take_last(self, count: int) -> None:
        """Let the `count` blocks that were freed last be taken after all other free blocks."""
        top = self.num_free
        self._free[:top] = np.roll(self._free[:top], count)
