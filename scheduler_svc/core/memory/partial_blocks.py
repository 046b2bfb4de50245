"""Partial matches: cached blocks whose beginning is worth a copy (`--prefix-cache radix`).

Prefixes are shared by full blocks (`prefix_cache`). This module adds sharing at token granularity. If a request's
tokens diverge from the cached tokens in the middle of a block, the equal tokens are shared through a copy. Before the
forward pass, the worker copies the cached block to one of the request's blocks, and only the remaining tokens are
computed. RadixAttention (SGLang, Zheng et al., NeurIPS 2024) shares at every token because its pages hold one token.
Copying has the same effect with the larger blocks that attention kernels need.

Within a run of the cache, only the run's next block can follow. At the end of a run, candidates are found by their
predecessor's key (for first blocks, the root's key). This key depends on all earlier tokens, the model and the scope,
so a request from another scope matches nothing, not even a first token. Candidates with the same predecessor are sorted
by their tokens, so the longest match is next to the position of the searched tokens.

In addition to full blocks, the cache retains the last, partly filled block of an ended sequence, the *tail*. A tail can
be copied but not shared.

Only *proven* blocks are copied. A block is proven if a token with finite logits was sampled from a sequence that
contains it, because NaN in the block would have reached these logits. A copy therefore never spreads invalid KV, and
need not be traced when a row fails. In addition, the step that wrote a proven block has returned its result before any
copy is planned.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import BlockKey


class PartialMatch(NamedTuple):
    """A block whose beginning matches the rest of a request."""

    block: int
    num_tokens: int
    """Number of equal leading tokens."""


class PartialBlocks:
    """Index of one worker's proven blocks that begin runs, and of tails, by their predecessor's key."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.least_tokens = max(1, block_size // 4)
        """Minimum match, in tokens.

        A copy moves a whole block in every layer, so fewer tokens are cheaper to compute.
        """
        self.block_size = block_size
        self._followers: dict[BlockKey, list[tuple[bytes, int]]] = {}
        """By the key of the block before: (tokens as int32, block), ascending."""
        self._entries: dict[int, tuple[BlockKey, bytes]] = {}
        """By block, the key of the preceding block, and its tokens."""
        self.proven = np.zeros(num_blocks, np.bool_)
        """Blocks that can be copied from; read-only."""
        self.tails = np.zeros(num_blocks, np.bool_)
        """Proven blocks that are not full; read-only."""
        self.listed = np.zeros(num_blocks, np.bool_)
        """Proven blocks that `find` can return; read-only."""

    def find(self, before: BlockKey, tokens: bytes) -> PartialMatch | None:
        """Return the block after `before` that shares the most leading tokens (int32), or None if no copy pays."""
        followers = self._followers.get(before)
        if followers is None or len(tokens) < TOKEN_BYTES * self.least_tokens:
            return None
        position = bisect_left(followers, (tokens, -1))
        best = max(followers[max(0, position - 1) : position + 1], key=lambda each: num_common(each[0], tokens))
        num_tokens = num_common(best[0], tokens)
        return PartialMatch(best[1], num_tokens) if num_tokens >= self.least_tokens else None

    def prove(self, blocks: IndexArray) -> None:
        """Mark full blocks as proven, so that they can be copied from."""
        self.proven[blocks] = True

    def add_tail(self, before: BlockKey, tokens: bytes, block: int) -> None:
        """Add a tail, which is a block whose first part contains the KV of `tokens`, so that it can be copied from."""
        self.proven[block] = self.tails[block] = True
        self.list(before, tokens, block)

    def list(self, before: BlockKey, tokens: bytes, block: int) -> None:
        """Add a proven block, which contains the KV of `tokens`, to the index."""
        assert self.proven[block]
        assert not self.listed[block]
        self.listed[block] = True
        self._entries[block] = (before, tokens)
        insort(self._followers.setdefault(before, []), (tokens, block))

    def forget(self, blocks: IndexArray) -> None:
        """Remove blocks because their memory is needed or their content is wrong."""
        self.proven[blocks] = self.tails[blocks] = False
        gone = blocks[self.listed[blocks]]
        self.listed[gone] = False
        for block in gone.tolist():
            before, tokens = self._entries.pop(block)
            followers = self._followers[before]
            if len(followers) == 1:
                del self._followers[before]
            else:
                del followers[bisect_left(followers, (tokens, block))]

    def validate(self) -> None:
        """Check that index and arrays agree."""
        listed = {
            block: (before, tokens) for before, followers in self._followers.items() for tokens, block in followers
        }
        assert listed == self._entries
        assert len(listed) == sum(map(len, self._followers.values())), "a block is listed twice"
        assert all(followers == sorted(followers) and followers for followers in self._followers.values())
        assert sorted(listed) == np.flatnonzero(self.listed).tolist()
        assert self.proven[self.listed].all()
        short = [block for block, (_, tokens) in listed.items() if len(tokens) < TOKEN_BYTES * self.block_size]
        assert sorted(short) == np.flatnonzero(self.tails).tolist()


def num_common(some: bytes, others: bytes) -> int:
    """Return how many leading tokens (int32) are equal."""
    same, most = 0, min(len(some), len(others)) // TOKEN_BYTES
    if some.startswith(others[: TOKEN_BYTES * most]):
        return most
    # Tokens that match up to an index also match before that index, so binary search finds the first difference.
    while most - same > 1:
        middle = (same + most) // 2
        if some.startswith(others[: TOKEN_BYTES * middle]):
            same = middle
        else:
            most = middle
    return same
