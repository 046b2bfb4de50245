"""Prefix directory: which workers have the beginning of a prompt in their prefix caches.

Each worker's cache registers the key of the first block of every prompt that it holds. So the workers that hold the
first block of a prompt are found without a search of all workers.
"""

from collections.abc import Iterable

from shared.prefix_keys import BlockKey


class PrefixDirectory:
    """By the key of a first block: the epochs of the workers that have it."""

    def __init__(self) -> None:
        """Start empty."""
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
