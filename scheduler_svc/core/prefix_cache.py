"""Prefix sharing by hash-chained full blocks (vLLM's automatic prefix caching): which block holds which key.

A block is shareable as soon as the step that writes it has been sent: plans are executed in order, and within a step
every layer writes the whole batch's KV before it attends. A block that nobody holds stays in the cache until its memory
is needed; the least recently used goes first, and of a chain the end before the beginning (see `BlockPool`).

While a prompt is being computed, the key of the block that its row computes next is *pending*. A request with the same
prefix finds everything before it in the cache, and waits at exactly that key instead of computing it a second time.

Prompts have hundreds of blocks, so everything here takes whole chains and leaves the loops to dict and numpy.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.events import Int32Array
from shared.prefix_keys import BlockKey

_NO_BLOCKS = np.zeros(0, np.int32)


class PrefixCache:
    """Which block holds the KV of which key, for one worker in one epoch."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._next_keys: dict[int, BlockKey] = {}
        """By row in prefill: the key of the block that it computes next."""
        self.holds = np.zeros(num_blocks, np.bool_)
        """Whether a block is shareable; to be read only."""

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[BlockKey]) -> Int32Array:
        """The blocks of the longest cached prefix of `keys`."""
        if not keys or keys[0] not in self._blocks:
            return _NO_BLOCKS
        found = list(map(self._blocks.get, keys))
        if None in found:
            del found[found.index(None) :]
        return np.array(found, np.int32)

    def publish(self, keys: Sequence[BlockKey], blocks: Int32Array) -> None:
        """Makes blocks shareable, except where another block has the key already."""
        numbers = blocks.tolist()
        if not self._blocks.keys().isdisjoint(keys):
            fresh = [index for index, key in enumerate(keys) if key not in self._blocks]
            keys, numbers = [keys[index] for index in fresh], [numbers[index] for index in fresh]
        self._blocks.update(zip(keys, numbers, strict=True))
        self._keys.update(zip(numbers, keys, strict=True))
        self.holds[numbers] = True

    def forget(self, blocks: Int32Array) -> None:
        """The blocks' memory is needed, or their content cannot be trusted."""
        keys = map(self._keys.pop, blocks[self.holds[blocks]].tolist())
        deque(map(self._blocks.pop, keys), maxlen=0)
        self.holds[blocks] = False

    def computes_next(self, row: int, key: BlockKey | None) -> None:
        """The row computes the block with this key next; None: none that others could share."""
        if key is None:
            self._next_keys.pop(row, None)
        else:
            self._next_keys[row] = key

    def is_pending(self, key: BlockKey) -> bool:
        """Whether a row computes the block with this key next."""
        return key in self._next_keys.values()

    def validate(self) -> None:
        """Checks that all directions agree."""
        assert {block: key for key, block in self._blocks.items()} == self._keys
        assert sorted(self._keys) == np.flatnonzero(self.holds).tolist()
