"""Prefix directory: which workers have cached the start of a prompt.

Each worker's cache registers the first block of every cached prompt. The scheduler can therefore find the workers with
a prompt's first block without searching all workers.
"""

from collections.abc import Iterable

from shared.prefix_keys import BlockKey


class PrefixDirectory:
    """Epochs of the workers that have a first block, by the block's key."""

    def __init__(self) -> None:
        self._epochs: dict[BlockKey, dict[int, None]] = {}

    def epochs(self, key: BlockKey) -> Iterable[int]:
        """Return the epochs of the workers that have a first block."""
        return self._epochs.get(key, ())

    def add(self, key: BlockKey, epoch: int) -> None:
        """Record that a worker has a first block."""
        self._epochs.setdefault(key, {})[epoch] = None

    def remove(self, key: BlockKey, epoch: int) -> None:
        """Record that a worker does not have a first block any more."""
        epochs = self._epochs[key]
        del epochs[epoch]
        if not epochs:
            del self._epochs[key]
