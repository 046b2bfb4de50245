"""Prefix directory: which workers have cached the start of a prompt.

The caches of each worker, on the device and in host memory, register the first block of every cached prompt. The
scheduler can therefore find the workers that have the first block of a prompt without searching all workers.
"""

from collections.abc import Collection

from shared.prefix_keys import BlockKey


class PrefixDirectory:
    """Epochs of the workers that have a first block, by the block's key."""

    def __init__(self) -> None:
        self._epochs: dict[BlockKey, dict[int, int]] = {}
        """By key and epoch: in how many tiers of the worker the block is."""

    def epochs(self, key: BlockKey) -> Collection[int]:
        """Return the epochs of the workers that have a first block."""
        return self._epochs.get(key, ())

    def add(self, key: BlockKey, epoch: int) -> None:
        """Record that a tier of a worker has a first block."""
        epochs = self._epochs.setdefault(key, {})
        epochs[epoch] = epochs.get(epoch, 0) + 1

    def remove(self, key: BlockKey, epoch: int) -> None:
        """Record that a tier of a worker does not have a first block any more."""
        epochs = self._epochs[key]
        epochs[epoch] -= 1
        if epochs[epoch]:
            return
        del epochs[epoch]
        if not epochs:
            del self._epochs[key]
