"""Host keys: which host block, or which slot on disk, contains the KV of which full block of a sequence.

The key of a block identifies all tokens up to its end, so a block can be found although the blocks before it are not in
host memory. Usually these are on the device: the end of a sequence moves to the host first. One lookup per block finds
the continuation of a prefix that the device has. Window blocks have longer keys, see `window_blocks`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from shared.prefix_keys import KEY_BYTES, BlockKey


class BlockEntry(NamedTuple):
    """Facts about a cached block that move with its KV to other tiers."""

    key: BlockKey
    root: BlockKey
    """Key before the first block of its sequence, which depends on the model and the cache scope."""
    is_first: bool
    """Whether the block begins a sequence."""


class ChainPlace(NamedTuple):
    """The place of a cached block in its sequence, for models with recurrent state."""

    previous: BlockKey
    """Key of the block before; empty for a first block."""
    num_blocks: int
    """Number of blocks of the sequence up to this one."""
    checkpoint: int
    """The checkpoint that has the state after it when the plan being made begins; -1 without one."""
    is_superseded: bool
    """Whether the sequence has a newer checkpoint on the device, and no branch in between."""


class CachedBlock(NamedTuple):
    """A cached block of the device that can move to another tier."""

    block: int
    entry: BlockEntry
    chain: ChainPlace | None
    """None if the model has no recurrent state."""


class HostKeys:
    """Map from keys to the host blocks with their KV, for one worker in one epoch."""

    def __init__(self, num_blocks: int, directory: PrefixDirectory | None = None, epoch: int = 0) -> None:
        """Make an empty table; `directory` gets the keys of first blocks, under `epoch`."""
        self._directory = directory
        self._epoch = epoch
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._roots: dict[int, BlockKey] = {}
        self.other: HostKeys | None = None
        """Table of the other tier below the device; None if there is only one."""
        self._firsts: set[int] = set()
        """Blocks that begin a sequence."""
        self.holds = np.zeros(num_blocks, np.bool_)
        """Whether a host block is in the table; read-only."""
        self.twins = np.zeros(num_blocks, np.bool_)
        """Host blocks that were copied back, so that the device has their content too."""
        self.returned = np.zeros(num_blocks, np.bool_)
        """Host blocks that were copied back at least once."""
        self.num_window_blocks = 0
        """Number of window blocks in the table."""
        self._previous: dict[int, BlockKey] = {}
        """Keys of the blocks before those in the table, as far as they are known."""
        self._num_after: Counter[BlockKey] = Counter()
        """By key: number of blocks in the table that directly follow the block with this key."""
        self.num_in_vain = 0
        """Number of blocks that were removed from all tiers below the device before they were copied back."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> int | None:
        """Return the host block with a key, or None."""
        return self._blocks.get(key)

    def match(self, keys: bytes, start: int) -> IndexArray:
        """Return the host blocks of the longest run of the joined `keys` that begins with key number `start`."""
        known, first = self._blocks, KEY_BYTES * start
        if keys[first : first + KEY_BYTES] not in known:
            return NO_INDICES
        found = [known.get(keys[at : at + KEY_BYTES], -1) for at in range(first, len(keys), KEY_BYTES)]
        blocks = np.array(found, np.intp)
        gap = int(blocks.argmin())
        return blocks[:gap] if blocks.item(gap) < 0 else blocks

    def entry(self, block: int) -> BlockEntry:
        """Return the entry of a block in the table."""
        return BlockEntry(self._keys[block], self._roots[block], block in self._firsts)

    def num_after(self, key: BlockKey) -> int:
        """Return how many blocks in the table directly follow a block, of those added with `previous`."""
        return self._num_after[key]

    def add(self, entries: Sequence[BlockEntry], blocks: IndexArray, previous: Sequence[BlockKey] = ()) -> None:
        """Add blocks with keys that are not in the table.

        Args:
            entries: their entries.
            blocks: host blocks that are not in the table.
            previous: keys of the blocks before them; empty if `num_after` is not used.
        """
        for block, key in zip(blocks.tolist(), previous, strict=False):
            self._previous[block] = key
            self._num_after[key] += 1
        for (key, root, is_first), block in zip(entries, blocks.tolist(), strict=True):
            assert key not in self._blocks
            self._blocks[key] = block
            self._keys[block] = key
            self._roots[block] = root
            self.num_window_blocks += len(key) > KEY_BYTES
            if is_first:
                self._firsts.add(block)
                if self._directory is not None:
                    self._directory.add(key, self._epoch)
        self.holds[blocks] = True
        self.twins[blocks] = self.returned[blocks] = False

    def forget(self, blocks: IndexArray) -> IndexArray:
        """Remove blocks; return those that were in the table."""
        gone = blocks[self.holds[blocks]]
        returned = self.returned[gone].tolist()
        self.holds[gone] = self.twins[gone] = False
        for block, has_returned in zip(gone.tolist(), returned, strict=True):
            key = self._keys.pop(block)
            del self._blocks[key], self._roots[block]
            self.num_window_blocks -= len(key) > KEY_BYTES
            before = self._previous.pop(block, None)
            if before is not None:
                self._num_after[before] -= 1
                if not self._num_after[before]:
                    del self._num_after[before]
            self.num_in_vain += not has_returned and (self.other is None or key not in self.other._blocks)
            if block in self._firsts:
                self._firsts.remove(block)
                if self._directory is not None:
                    self._directory.remove(key, self._epoch)
        return gone

    def leave_directory(self) -> None:
        """Remove this table's keys from the directory, because its worker is lost."""
        if self._directory is not None:
            for block in self._firsts:
                self._directory.remove(self._keys[block], self._epoch)
            self._directory = None

    def validate(self) -> None:
        """Check that the table is consistent."""
        assert {block: key for key, block in self._blocks.items()} == self._keys, "a host block has two keys"
        assert self._roots.keys() == self._keys.keys()
        assert sorted(self._keys) == np.flatnonzero(self.holds).tolist()
        assert self._firsts <= self._keys.keys()
        assert self.holds[self.twins].all()
        assert self.num_window_blocks == sum(len(key) > KEY_BYTES for key in self._blocks)
        assert self._previous.keys() <= self._keys.keys()
        assert self._num_after == Counter(self._previous.values())
