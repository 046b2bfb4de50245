"""Cached prefixes: what the caches of a worker hold of a request's tokens.

A request's tokens have one key per full block. The blocks with its first keys may be in three tiers, in this order: on
the device (`prefix_cache`), in host memory, and on disk (`swapping`). Where a request can continue depends on the
layers of the model:

* With *full attention*, after any cached block, and in the middle of a block that may be copied (`partial_blocks`).
* With *sliding windows*, at a boundary whose window blocks are on the device or in host memory (`window_blocks`).
* With *recurrent state*, at a boundary whose state is on the device or in host memory (`state_checkpoints`).

A preempted request may instead have its whole KV in host memory, also behind its last full block.

This module only finds and uses what is cached. `prefix_publisher` adds the blocks of rows to the cache.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.interface.events import ModelFacts
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.swapping import SwappedKV, SwapSpace
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks, window_key
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.chunks import chunk_cost
from scheduler_svc.core.workers.cost_model import CostModel
from shared.prefix_keys import KEY_BYTES, BlockKey, root_key

TIERS = ("device", "host", "disk")
"""The tiers, highest first."""
_MAX_LOADS = 8
"""Number of times that a request waits for blocks on disk. Memory pressure may evict them before the request starts."""
_LEAST_WAIT_S = 0.02
"""A request waits at least this long for the disk, s."""
_UNKNOWN_WAIT_S = 0.1
"""The same before the time to compute tokens is measured."""
_READ_GAIN, _LEAST_READ_SHARE = 1 / 32, 1 / 64
"""Weight of a new prefix in `read_share`, and the least share with which blocks are written to disk."""


class Match(NamedTuple):
    """The parts of a request's KV that a worker has."""

    blocks: IndexArray
    """Cached blocks that the request can share."""
    partial: PartialMatch | None = None
    """A block whose beginning the request can copy to its next block."""
    swapped: SwappedKV | None = None
    """The whole KV in the worker's host memory. If it is present, the other fields are ignored."""
    host: IndexArray = NO_INDICES
    """Host blocks with the KV after `blocks`."""
    on_disk: IndexArray = NO_INDICES
    """Slots on disk with the KV after `host`."""
    next_key: BlockKey = b""
    """Key of the first missing full block; empty if no further block can be cached.

    With recurrent state or windows: key of the last block before the longest boundary that is being computed and can be
    used.
    """
    num_known: int = 0
    """With windows: number of cached blocks, including those after the last boundary."""
    host_tail: IndexArray = NO_INDICES
    """With windows: what is only in host memory of the tail before the end, as `[number, (position, table)]`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the device and in host memory that the request can share."""
        return len(self.blocks) + len(self.host)


class CachedPrefixes:
    """The cached prefixes of one worker in one epoch, in all tiers."""

    def __init__(
        self,
        *,
        enabled: bool,
        epoch: int,
        model: ModelFacts,
        block_size: int,
        pool: BlockPool,
        swap: SwapSpace,
        checkpoints: StateCheckpoints | None,
        windows: WindowBlocks | None,
        costs: CostModel,
        facts: TokenFacts,
    ) -> None:
        """Describe the caches of a worker.

        Args:
            enabled: see the attribute.
            epoch: the worker's epoch.
            model: the worker's model.
            block_size: tokens per block.
            pool: the blocks on the device.
            swap: the blocks and states in host memory and on disk.
            checkpoints: the recurrent states on the device; None if requests cannot begin with one.
            windows: the blocks of layers with a sliding window; None without such blocks.
            costs: the predicted times of steps and copies.
            facts: computes the keys of tokens.
        """
        self.enabled = enabled
        """Whether requests may use cached blocks. If not, only the KV of preempted requests is found."""
        self._epoch = epoch
        self._model = model
        self._block_size = block_size
        self._pool = pool
        self._cache = pool.cache
        self._swap = swap
        self._checkpoints = checkpoints
        self._windows = windows
        self._costs = costs
        self._facts = facts
        self.read_share = 1.0
        """Share of the latest prefixes on disk whose tokens were read, or could have been, before they were computed.
        """

    @property
    def has_boundaries(self) -> bool:
        """Whether requests can continue only after boundaries, and not after every cached block."""
        return self._checkpoints is not None or self._windows is not None

    # ---------------------------------------------------------------- keys

    def root_key(self, request: Request) -> BlockKey:
        """Return the key before the request's first block."""
        return root_key(self._model.fingerprint, request.spec.cache_scope)

    def keys(self, request: Request) -> bytes:
        """Return the joined keys of all full blocks of the request's tokens."""
        block_size = self._block_size
        keys = request.keys.get(block_size, b"")
        num_keys = len(keys) // KEY_BYTES
        if len(request.tokens) // block_size > num_keys:
            root = keys[-KEY_BYTES:] or self.root_key(request)
            keys += self._facts.following_keys(root, request.tokens[num_keys * block_size :].tobytes(), block_size)
            request.keys[block_size] = keys
        return keys

    def last_key(self, request: Request, num_blocks: int) -> BlockKey:
        """Return the key of the last of a request's first `num_blocks` blocks."""
        return self.keys(request)[KEY_BYTES * (num_blocks - 1) : KEY_BYTES * num_blocks]

    def shareable_keys(self, request: Request) -> bytes:
        """Return the joined keys of the leading full blocks that the request could take from the cache.

        The last known token is always computed, because its logits are needed.
        """
        if not self.enabled or request.computes_whole_prompt:
            return b""
        return self.keys(request)[: KEY_BYTES * ((len(request.tokens) - 1) // self._block_size)]

    # ---------------------------------------------------------------- search in all tiers

    def match(self, request: Request) -> Match:
        """Return the parts of the request's KV that this worker has."""
        return self._match(request, self._swap)

    def match_on_device(self, request: Request) -> Match:
        """Like `match`, without cached blocks in host memory.

        Searching for them is slow, and a request needs as much device memory with them as without. With windows, it may
        need a tail more, which admission checks again (`find_room`).
        """
        return self._match(request, None)

    def _match(self, request: Request, host_space: SwapSpace | None) -> Match:
        swapped = self.swapped_here(request)
        if swapped is not None:
            return Match(NO_INDICES, swapped=swapped)
        cache, keys = self._cache, self.shareable_keys(request)
        blocks = cache.match(keys)
        if self._checkpoints is not None:
            return self._match_states(self._checkpoints, keys, blocks, host_space)
        if self._windows is not None:
            return self._match_windowed(self._windows, keys, blocks, host_space)
        host = NO_INDICES if host_space is None else host_space.match(keys, len(blocks))
        num_found = len(blocks) + len(host)
        next_key = keys[KEY_BYTES * num_found : KEY_BYTES * (num_found + 1)]
        if host_space is not None and host_space.disk is not None:
            on_disk = host_space.disk.match(keys, num_found)
            if len(on_disk):
                return Match(blocks, host=host, on_disk=on_disk, next_key=next_key)
        if cache.partial is None or len(host) or request.computes_whole_prompt:
            return Match(blocks, host=host, next_key=next_key)
        start = len(blocks) * self._block_size
        end = min(start + self._block_size, len(request.tokens) - 1)
        text = request.tokens[start:end].tobytes()
        partial = cache.match_partial(self.root_key(request), keys, len(blocks), text)
        return Match(blocks, partial, next_key=next_key)

    @staticmethod
    def _match_windowed(windows: WindowBlocks, keys: bytes, blocks: IndexArray, host_space: SwapSpace | None) -> Match:
        """Return the prefix before the last boundary whose tail is on the device or in host memory.

        Args:
            windows: the window blocks.
            keys: the joined keys that the request can share.
            blocks: the cached blocks on the device.
            host_space: the host memory to search; None to search only the device.
        """
        if host_space is None or not host_space.keys:
            num_known, reach = len(blocks), windows.reach(blocks)
            return Match(blocks[:reach], next_key=windows.awaited(keys, reach), num_known=num_known)
        host = host_space.match(keys, len(blocks))
        num_known = len(blocks) + len(host)
        reach = windows.reach_with_host(blocks, keys, num_known, host_space.keys)
        return Match(
            blocks[:reach],
            host=host[: max(0, reach - len(blocks))],
            next_key=windows.awaited(keys, reach),
            num_known=num_known,
            host_tail=windows.missing(blocks, reach),
        )

    def _match_states(
        self, checkpoints: StateCheckpoints, keys: bytes, blocks: IndexArray, host_space: SwapSpace | None
    ) -> Match:
        """Return the blocks of the joined `keys` up to the last state on the device, or in host memory if that pays.

        Args:
            checkpoints: the states on the device.
            keys: the joined keys that the request can share.
            blocks: the cached blocks on the device.
            host_space: space with cached blocks; None to search only for states there.
        """
        size, states = self._block_size, self._swap.states
        reach, num_host = checkpoints.reach(blocks), 0
        if states is not None and states.num_cached:
            host = NO_INDICES if host_space is None else host_space.match(keys, len(blocks))
            for most in (len(blocks) + len(host), len(blocks)):
                found = states.reach(keys, reach, most)
                cost = chunk_cost((found - reach) * size, reach * size, self._model.break_even_context)
                num_host = max(0, found - len(blocks))
                if found > reach and self._costs.restores(num_host + self._swap.state_blocks, cost):
                    next_key = checkpoints.awaited(keys, found)
                    return Match(blocks[:found], host=host[:num_host], next_key=next_key)
        return Match(blocks[:reach], next_key=checkpoints.awaited(keys, reach))

    def swapped_here(self, request: Request) -> SwappedKV | None:
        """Return the request's KV in this worker's host memory, or None."""
        return request.swapped if request.swapped is not None and request.swapped.epoch == self._epoch else None

    def num_known(self, keys: bytes) -> int:
        """Return the number of leading blocks of the joined `keys` whose KV is on the device or in host memory."""
        num_blocks = self._cache.count(keys)
        return num_blocks + len(self._swap.match(keys, num_blocks))

    def cached_blocks(self, request: Request) -> IndexArray:
        """Return the cached blocks on the device with the request's first tokens."""
        return self._cache.match(self.keys(request))

    def cached_block(self, request: Request, num_blocks: int) -> int | None:
        """Return the last of a request's first `num_blocks` blocks in the cache; None if one of them is not cached."""
        blocks = self._cache.match(self.keys(request)[: KEY_BYTES * num_blocks])
        return int(blocks[-1]) if 0 < len(blocks) == num_blocks else None

    def shared_blocks(self, match: Match) -> IndexArray:
        """Return the cached blocks on the device that a request with this match shares, of all KV groups."""
        blocks = match.blocks
        return blocks if self._windows is None else np.concatenate((blocks, self._windows.tail_of(blocks).ravel()))

    def tier(self, end: BlockKey, block: int | None) -> str:
        """Return the highest tier from which a request can continue after a sequence; empty if it cannot.

        Only the last block, its window blocks and its state are looked up, because the end of a sequence leaves a tier
        before its beginning.

        Args:
            end: the key of the last full block.
            block: the block on the device that had this key when the sequence was computed; None if it was not here.
        """
        blocks = NO_INDICES if block is None else np.array([block], np.intp)
        on_device = any(each.entry.key == end for each in self._cache.entries(blocks))
        on_host = on_device or self._swap.keys.get(end) is not None
        if self._windows is not None and on_host:
            missing = self._windows.missing(blocks if on_device else NO_INDICES, 1)
            on_device &= not len(missing)
            on_host &= all(self._swap.keys.get(window_key(end, table)) is not None for table in missing[:, 1].tolist())
        elif self._model.state_bytes:
            has_state = self._swap.states is not None and self._swap.states.reach(end, 0, 1) > 0
            has_checkpoint = self._checkpoints is not None and self._checkpoints.reach(blocks) > 0
            on_device &= has_state or has_checkpoint
            on_host &= has_state
        if on_device:
            return "device"
        if on_host:
            return "host"
        return "disk" if self._swap.disk is not None and self._swap.disk.keys.get(end) is not None else ""

    # ---------------------------------------------------------------- saved computation

    def cached_tokens(self, request: Request) -> int:
        """Return how many of the request's tokens need no computation on this worker."""
        if request.swapped is None and self._cache.partial is None and not self.has_boundaries:
            # Count the blocks without building a list, because every arrival looks up its prompt.
            keys = self.shareable_keys(request)
            num_blocks = self._cache.count(keys)
            num_blocks += len(self._swap.match(keys, num_blocks))
            if self._swap.disk is not None:
                num_blocks += self._num_readable(self._swap.disk.match(keys, num_blocks), num_blocks)
            return num_blocks * self._block_size
        return self.num_cached(self.match(request))

    def num_cached(self, match: Match) -> int:
        """Return how many tokens a match saves from computation."""
        if match.swapped is not None:
            return match.swapped.num_tokens
        num_partial = match.partial.num_tokens if match.partial is not None else 0
        num_blocks = match.num_blocks
        if len(match.on_disk):
            num_blocks += self._num_readable(match.on_disk, num_blocks)
        return num_blocks * self._block_size + num_partial

    def _num_readable(self, on_disk: IndexArray, num_before: int) -> int:
        """Return how many blocks on disk save computation if they follow so many cached blocks."""
        num_blocks, size = len(on_disk), self._block_size
        if not num_blocks:
            return 0
        cost = chunk_cost(num_blocks * size, num_before * size, self._model.break_even_context)
        return num_blocks if self._costs.may_read(num_blocks, cost) else 0

    def num_unusable_tokens(self, request: Request, num_computed: int) -> int:
        """Return how many cached tokens after the first `num_computed` a request computes again.

        With recurrent state or windows, it cannot begin after them, because no boundary follows. Tokens that it could
        use with host memory do not count: computing them was faster than copying.
        """
        if not self.has_boundaries:
            return 0
        keys, size = self.shareable_keys(request), self._block_size
        if self._windows is None:
            num_known, usable = self.num_known(keys), num_computed // size
            if self._swap.states is not None:
                usable = self._swap.states.reach(keys, usable, num_known)
            return max(0, num_known * size - max(num_computed, usable * size))
        match = self._match_windowed(self._windows, keys, self._cache.match(keys), self._swap)
        return max(0, match.num_known * size - max(num_computed, match.num_blocks * size))

    @property
    def tokens_per_cached_block(self) -> int:
        """Average number of tokens that need no computation per cached block, at least 1.

        A prefix has window blocks besides its full blocks.
        """
        windows, size = self._windows, self._block_size
        if windows is None:
            return size
        num_cached = int(np.count_nonzero(self._cache.holds)) + len(self._swap.keys)
        num_full = num_cached - windows.num_attached - self._swap.keys.num_window_blocks
        return max(1, size * num_full // max(1, num_cached))

    # ---------------------------------------------------------------- use

    def restore_state(self, request: Request, blocks: IndexArray, step: int) -> int:
        """Return the checkpoint, or the place in host memory, with the state after a request's first cached blocks.

        The plan of this step restores the state.
        """
        assert self._checkpoints is not None
        if self._checkpoints.reach(blocks) == len(blocks):
            return self._checkpoints.restore(int(blocks[-1]))
        assert self._swap.states is not None
        return self._swap.states.load(self.last_key(request, len(blocks)), step)

    def retain(self, request: Request, num_tokens: int, until: float, session: Hashable | None) -> None:
        """Retain the cached blocks of a request's first tokens until a time, in s, or the end of its session.

        See `Retention`.
        """
        # The recurrent state of a checkpoint cannot be retained, and blocks are of no use without it.
        if not self.enabled or self._checkpoints is not None:
            return
        blocks = self._cache.match(self.keys(request)[: KEY_BYTES * (num_tokens // self._block_size)])
        if self._windows is not None:
            blocks = self.shared_blocks(Match(blocks[: self._windows.reach(blocks)]))
        if len(blocks):
            tenant, priority = request.spec.tenant, request.spec.retention_priority
            self._pool.retain(blocks, tenant, priority, until, session, whole=self._windows is not None)

    def is_awaited(self, key: BlockKey) -> bool:
        """Return whether a request should wait for this block: a row computes it next, or it is read from disk."""
        return self._cache.is_pending(key) or (self._swap.disk is not None and self._swap.disk.is_awaited(key))

    def load(self, request: Request, match: Match, now: float, *, num_started: int, num_competing: int) -> None:
        """Start to read the blocks on disk that continue a match, if this is faster than computing them.

        Tokens to compute wait for those of other requests, but a read takes no time of the device.

        Args:
            request: the request.
            match: its cached blocks.
            now: current time, s.
            num_started: prompt tokens in the worker's rows that are not planned yet.
            num_competing: uncached prompt tokens of the waiting requests, per worker.
        """
        disk, size = self._swap.disk, self._block_size
        if disk is None or not disk.is_ready or not len(match.on_disk) or request.num_loads >= _MAX_LOADS:
            return
        num_before, num_blocks = match.num_blocks, len(match.on_disk)
        cost = chunk_cost(num_blocks * size, num_before * size, self._model.break_even_context)
        cost += num_started + max(0, num_competing - num_blocks * size)
        pays = self._costs.may_read(num_blocks + disk.num_reading, cost)
        self.read_share += _READ_GAIN * (pays - self.read_share)
        if not self._costs.reads(num_blocks + disk.num_reading, cost):
            return
        recompute_s = cost * self._costs.prompt_token_s if self._costs.has_chunks else _UNKNOWN_WAIT_S
        until = now + max(recompute_s, _LEAST_WAIT_S)
        num_read = self._swap.read_from_disk(match.on_disk, match.host, until)
        if num_read:
            request.num_loads += 1
            request.loaded_tokens += num_read * size

    def write_to_disk(self, now: float) -> None:
        """Start to write cached blocks to disk if reading them pays, alone or while other prompts wait."""
        disk = self._swap.disk
        if disk is None or not disk.wants_to_write(now):
            return
        if self.read_share > _LEAST_READ_SHARE or self._costs.keeps_on_disk(self._block_size):
            self._swap.write_to_disk(now)
