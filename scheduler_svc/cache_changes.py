"""Cache changes: blocks that were added to or removed from the workers' prefix caches, for endpoint pickers.

An endpoint picker routes a request to the service that has cached the most of its prompt. Events for endpoint pickers
contain tokens, so this module reports only blocks in the shared scope. Prompts of principals, and of requests with a
separate scope, are never reported. A block on several workers counts once.

This module only reads the core. `observe` reads a worker's rows after a plan, and `collect` finds blocks that have left
the caches. Both take time proportional to the number of changes. In addition, each call to `collect` checks every
reported block once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES, SHARED_SCOPE, BlockKey


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks that are in a cache now."""

    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    """Key of the preceding block; None if the blocks begin a prompt."""
    tokens: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer in any cache."""

    keys: tuple[BlockKey, ...]


Change = Stored | Removed


@dataclass(slots=True)
class _Cache:
    """Reported content of one worker's cache."""

    worker: Worker
    rows: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """For each row, its request and number of blocks at the last check."""
    keys: dict[int, BlockKey] = field(default_factory=dict)
    """Reported key of each block, by block."""


class CacheChanges:
    """Collector of changes over all workers."""

    def __init__(self) -> None:
        """Start with empty caches."""
        self._caches: dict[int, _Cache] = {}
        """By epoch."""
        self._holders: Counter[BlockKey] = Counter()
        self._stored: dict[BlockKey, Stored] = {}
        """Report of each block, by key, in the order of the reports."""
        self._changes: list[Change] = []

    def observe(self, worker: Worker, admitted: Iterable[int]) -> None:
        """Check a worker's rows after a plan was made.

        Args:
            worker: the worker.
            admitted: rows that got a new request with this plan.
        """
        if not worker.prefixes.enabled:
            return
        known = self._caches.get(worker.epoch)
        if known is None:
            known = self._caches[worker.epoch] = _Cache(worker)
        self._look_at_ended(known)
        for row in admitted:
            request = worker.rows.requests[row]
            if request is not None:
                known.rows[row] = request, 0
        for row, (request, seen) in known.rows.items():
            published = worker.rows.published.item(row)
            if published != seen:
                self._look(known, request, seen, published)
                known.rows[row] = request, published

    def collect(self, epochs: Collection[int]) -> list[Change]:
        """Return the changes since the last call.

        Args:
            epochs: epochs of the workers that are connected.
        """
        gone: list[BlockKey] = []
        for epoch, known in list(self._caches.items()):
            if epoch not in epochs:
                gone += self._release(known, list(known.keys))
                del self._caches[epoch]
                continue
            self._look_at_ended(known)
            if known.keys:
                blocks = np.fromiter(known.keys, np.int64, len(known.keys))
                gone += self._release(known, blocks[~known.worker.pool.cache.holds[blocks]].tolist())
        if gone:
            self._changes.append(Removed(tuple(gone)))
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> Iterator[Change]:
        """Yield all cached blocks for a new subscriber; parents come first."""
        return iter(self._stored.values())

    def _look_at_ended(self, known: _Cache) -> None:
        """Report the blocks of requests that have left their rows.

        When a request leaves, its last blocks enter the cache.
        """
        requests = known.worker.rows.requests
        for row, (request, seen) in list(known.rows.items()):
            if requests[row] is not request:
                del known.rows[row]
                self._look(known, request, seen, len(request.tokens) // known.worker.rows.block_size)

    def _look(self, known: _Cache, request: Request, first: int, last: int) -> None:
        """Report a request's cached blocks from `first` to `last`."""
        size = known.worker.rows.block_size
        joined = request.keys.get(size, b"")[: KEY_BYTES * last]
        blocks = known.worker.pool.cache.match(joined).tolist()
        fresh: list[BlockKey] = []
        gone: list[BlockKey] = []
        for number in range(first, len(blocks)):
            block, key = blocks[number], joined[KEY_BYTES * number : KEY_BYTES * (number + 1)]
            if known.keys.get(block) == key:
                continue
            gone += self._release(known, [block])
            if request.spec.cache_scope != SHARED_SCOPE:
                continue
            known.keys[block] = key
            self._holders[key] += 1
            if self._holders[key] == 1:
                parent = joined[KEY_BYTES * (number - 1) : KEY_BYTES * number] if number else None
                tokens = tuple(request.tokens[number * size : (number + 1) * size])
                self._stored[key] = Stored((key,), parent, tokens, size)
                fresh.append(key)
        if gone := [key for key in gone if key not in self._stored]:
            self._changes.append(Removed(tuple(gone)))
        self._changes += _joined(self._stored[key] for key in fresh)

    def _release(self, known: _Cache, blocks: list[int]) -> list[BlockKey]:
        """Drop blocks from a cache; return the keys that are no longer in any cache."""
        gone = []
        for block in blocks:
            key = known.keys.pop(block, None)
            if key is None:
                continue
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key], self._stored[key]
                gone.append(key)
        return gone


def _joined(blocks: Iterable[Stored]) -> Iterator[Stored]:
    """Yield consecutive blocks as one change."""
    run: list[Stored] = []
    for block in blocks:
        if run and block.parent != run[-1].keys[0]:
            yield _join(run)
            run = []
        run.append(block)
    if run:
        yield _join(run)


def _join(run: list[Stored]) -> Stored:
    return Stored(
        tuple(block.keys[0] for block in run),
        run[0].parent,
        tuple(token for block in run for token in block.tokens),
        run[0].block_size,
    )
