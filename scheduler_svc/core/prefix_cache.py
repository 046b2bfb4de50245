"""Prefix sharing by hash-chained full blocks (vLLM's automatic prefix caching): which block holds which key.

A block is shareable as soon as the step that writes it has been sent: plans are executed in order, and within a step
every layer writes the whole batch's KV before it attends. A block that nobody holds stays in the cache until its memory
is needed; the least recently used goes first, and of a chain the end before the beginning (see `BlockPool`).

While a prompt is being computed, the keys of its blocks to come are *pending*; a request with the same prefix waits for
them instead of computing them a second time.
"""

from collections.abc import Sequence

from shared.prefix_keys import BlockKey


class PrefixCache:
    """Which block holds the KV of which key, for one worker in one epoch."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._pending: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The blocks of the longest cached prefix of `keys`."""
        blocks: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, key: BlockKey, block: int) -> bool:
        """Makes a block shareable; False when another block has its key already."""
        self._pending.pop(key, None)
        if key in self._blocks:
            return False
        self._blocks[key] = block
        self._keys[block] = key
        return True

    def forget(self, block: int) -> None:
        """The block's memory is needed, or its content cannot be trusted."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def holds(self, block: int) -> bool:
        """Whether the block is shareable."""
        return block in self._keys

    def expect(self, keys: Sequence[BlockKey], row: int) -> None:
        """A row is going to compute blocks with these keys."""
        for key in keys:
            self._pending.setdefault(key, row)

    def unexpect(self, keys: Sequence[BlockKey], row: int) -> None:
        """The row will not."""
        for key in keys:
            if self._pending.get(key) == row:
                del self._pending[key]

    def is_pending(self, key: BlockKey) -> bool:
        """Whether a row is computing the block with this key."""
        return key in self._pending

    def validate(self) -> None:
        """Checks that both directions agree."""
        assert {block: key for key, block in self._blocks.items()} == self._keys
