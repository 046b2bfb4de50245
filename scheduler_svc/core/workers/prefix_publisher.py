"""Prefix publisher: adds the blocks of a worker's rows to the prefix cache, so that other requests can share them.

A full block is published by the plan that computes its last token (`architecture.md`, shared prefixes). Requests with
the same prefix wait for the block that a row in prefill computes next. With windows or recurrent state, they wait for
the next *boundary* instead, because a request can continue only there. When a row leaves, its computed blocks are
published with generated tokens, and with the last window or state.

A published block is *proven* after a token was sampled from its KV. Only proven blocks are copied in part.
"""

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, any_of
from scheduler_svc.core.interface.events import RetainedSequence
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import CachedPrefixes, Match
from scheduler_svc.core.workers.rows import RowTable
from scheduler_svc.core.workers.steps_in_flight import Departure
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import KEY_BYTES


class PrefixPublisher:
    """Publishes the blocks of one worker in one epoch."""

    def __init__(
        self,
        prefixes: CachedPrefixes,
        rows: RowTable,
        pool: BlockPool,
        checkpoints: StateCheckpoints | None,
        windows: WindowBlocks | None,
        facts: TokenFacts,
    ) -> None:
        """Publish to the caches of `prefixes`. The other arguments are those of the worker."""
        self._prefixes = prefixes
        self._rows = rows
        self._pool = pool
        self._cache = pool.cache
        self._checkpoints = checkpoints
        self._windows = windows
        self._facts = facts

    # ---------------------------------------------------------------- rows in prefill

    def publish_blocks(self, row: int, num_computed: int) -> None:
        """Publish the row's full blocks. The plan that is being made computes the row's tokens up to `num_computed`."""
        if not self._prefixes.enabled:
            return
        request = self._rows.requests[row]
        assert request is not None
        self._publish(row, request, self._rows.blocks(row), num_computed)
        if self._windows is not None:
            for num_blocks in self._windows.reached(row, num_computed // self._rows.block_size):
                self._attach(row, request, num_blocks)
            self._cache.computes_next(row, self._windows.next_key(row))
            return
        if self._checkpoints is not None:
            return  # Other requests wait for checkpoints, see `want_checkpoints`.
        start = KEY_BYTES * (num_computed // self._rows.block_size)
        is_complete = num_computed == len(request.tokens)
        self._cache.computes_next(row, b"" if is_complete else self._prefixes.keys(request)[start : start + KEY_BYTES])

    def want_checkpoints(self, row: int, num_shared: int) -> None:
        """Choose where a row in prefill saves its recurrent state, so that other requests wait for it.

        Args:
            row: the row.
            num_shared: leading full blocks that are computed already.
        """
        request = self._rows.requests[row]
        if self._checkpoints is None or request is None:
            return
        fork = self._prefixes.num_known(self._prefixes.shareable_keys(request))
        end = (len(request.tokens) - 1) // self._rows.block_size
        counts = sorted({count for count in (fork, end) if count > num_shared})
        self._cache.computes_next(row, self._checkpoints.want(row, self._prefixes.keys(request), counts))

    def boundaries(self, request: Request, match: Match) -> tuple[int, ...]:
        """Return the boundaries at which a row with the request keeps its window blocks, ascending."""
        is_swapped = match.swapped is not None
        if self._windows is None or not self._prefixes.enabled or request.computes_whole_prompt or is_swapped:
            return ()
        end = (len(request.tokens) - 1) // self._rows.block_size
        return tuple(sorted({count for count in (match.num_known, end) if count > match.num_blocks}))

    def want_boundaries(self, row: int, boundaries: tuple[int, ...]) -> None:
        """Set the boundaries of a row in prefill, so that other requests wait for them."""
        request = self._rows.requests[row]
        assert request is not None
        assert self._windows is not None
        self._cache.computes_next(row, self._windows.want(row, self._prefixes.keys(request), list(boundaries)))

    def save_prompt(self, row: int, num_computed: int) -> list[tuple[int, int]]:
        """Return the saves of a row whose prompt is computed up to `num_computed` by the plan being made.

        Returns:
            (number of tokens, checkpoint), ascending.
        """
        request, saves = self._rows.requests[row], []
        assert request is not None
        assert self._checkpoints is not None
        for num_blocks in self._checkpoints.reached(row, num_computed // self._rows.block_size):
            block = self._prefixes.cached_block(request, num_blocks)
            if block is None:
                continue
            slot = self._checkpoints.save(row, self._rows.generation.item(row), block)
            if slot is not None:
                saves.append((num_blocks * self._rows.block_size, slot))
        self._cache.computes_next(row, self._checkpoints.next_key(row))
        return saves

    # ---------------------------------------------------------------- proof

    def prove_prefilled(self, rows: IndexArray) -> None:
        """Mark these rows' cached blocks as proven, so that others can copy from them.

        The first tokens of these rows were sampled.
        """
        for row in rows.tolist():
            request, num_blocks = self._rows.requests[row], int(self._rows.published[row])
            assert request is not None
            self._prove(request, self._rows.blocks(row)[:num_blocks], num_blocks * self._rows.block_size)

    def prove_departed(self, departure: Departure) -> None:
        """Mark a departed request's blocks as proven: a token was sampled from its row after it left."""
        if self._cache.partial is not None:
            self._prove(departure.request, departure.blocks, departure.num_tokens)

    def _prove(self, request: Request, blocks: IndexArray, num_tokens: int) -> None:
        """Mark the blocks of a request's first tokens as proven: the logits computed from their KV were finite."""
        if self._cache.partial is not None:
            text = request.tokens[:num_tokens].tobytes()
            self._cache.prove(self._prefixes.root_key(request), self._prefixes.keys(request), text, blocks)

    # ---------------------------------------------------------------- rows that leave

    def publish_departing(
        self, row: int, request: Request, blocks: IndexArray, num_tokens: int, *, is_proven: bool, last_written: int
    ) -> None:
        """Publish what a row has computed, including its generated tokens, when its request leaves it.

        Args:
            row: the row. It still has its window blocks and checkpoints.
            request: the request that leaves.
            blocks: the row's full blocks.
            num_tokens: number of the request's first tokens whose KV the sent plans compute.
            is_proven: whether tokens were sampled from this KV.
            last_written: the last position whose KV sent steps may write.
        """
        if not self._prefixes.enabled:
            return
        self._publish(row, request, blocks, num_tokens)
        if is_proven:
            self._prove(request, blocks, num_tokens)
        if self._checkpoints is not None:
            self._publish_checkpoint(self._checkpoints, row, request, num_tokens)
        if self._windows is not None:
            self._attach(row, request, num_tokens // self._rows.block_size, last_written)

    def _publish(self, row: int, request: Request, blocks: IndexArray, num_computed: int) -> None:
        num_blocks = num_computed // self._rows.block_size
        if num_blocks > self._rows.published.item(row):
            cache = self._cache
            text = b"" if cache.partial is None else request.tokens[: num_blocks * self._rows.block_size].tobytes()
            keys = self._prefixes.keys(request)[: KEY_BYTES * num_blocks]
            cache.publish(keys, blocks[:num_blocks], text, self._prefixes.root_key(request))
            self._rows.published[row] = num_blocks

    def _attach(self, row: int, request: Request, num_blocks: int, last_written: int | None = None) -> None:
        """Make the row's tail before a block boundary available, if its full blocks are in the cache."""
        blocks = self._cache.match(self._prefixes.keys(request)[: KEY_BYTES * num_blocks])
        if len(blocks) == num_blocks:
            self._cache.attach(row, blocks, last_written=last_written)

    def _publish_checkpoint(self, checkpoints: StateCheckpoints, row: int, request: Request, num_known: int) -> None:
        """Make the newest state of a row that leaves available, if its blocks are in the cache."""
        num_tokens = checkpoints.leave(row, num_known)
        if not num_tokens:
            return
        block = self._prefixes.cached_block(request, num_tokens // self._rows.block_size)
        if block is None:
            checkpoints.discard(row)
        else:
            checkpoints.publish(row, block)

    # ---------------------------------------------------------------- retained sequences

    def adopt(self, sequences: tuple[RetainedSequence, ...]) -> None:
        """Cache the sequences whose KV the worker has retained. No block of a new worker is in use.

        Keys depend on all tokens, so a sequence is only found by requests with the same tokens and the same scope.
        """
        # KV of a model with recurrent state or windows is of no use without a boundary.
        if self._prefixes.enabled and not self._prefixes.has_boundaries:
            adopted = [self._adopt(each) for each in sequences]
            if adopted:
                self._pool.adopt(np.concatenate(adopted))

    def _adopt(self, sequence: RetainedSequence) -> IndexArray:
        """Make the blocks of a sequence shareable, and return those that no other sequence has."""
        cache, block_size = self._cache, self._rows.block_size
        num_tokens, blocks = len(sequence.tokens) // TOKEN_BYTES, sequence.blocks
        num_full = num_tokens // block_size
        full_tokens = sequence.tokens[: TOKEN_BYTES * block_size * num_full]
        keys = self._facts.following_keys(sequence.root, full_tokens, block_size)
        found = cache.match(keys)
        rest = blocks[len(found) :]
        # Lists and sets, because a short array takes five times as long.
        numbers = rest.tolist()
        if max(numbers, default=0) >= self._pool.num_blocks:
            return NO_INDICES
        if len(set(numbers)) < len(numbers) or any_of(cache.holds[rest]):
            return NO_INDICES
        chain = np.concatenate((found, rest))
        cache.publish(keys, chain[:num_full], b"" if cache.partial is None else full_tokens, sequence.root)
        own = chain[len(found) : num_full]
        if not sequence.is_proven or cache.partial is None:
            return own
        cache.prove(sequence.root, keys, sequence.tokens, chain)
        tail = chain[num_full:]
        return np.concatenate((own, tail[cache.holds[tail]]))
