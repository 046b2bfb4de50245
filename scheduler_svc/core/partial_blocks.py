"""The last step of a radix tree over tokens: cached blocks whose beginning is worth a copy (`--prefix-cache radix`).

Prefixes are shared by full blocks (`prefix_cache`). Where a request's tokens leave the cached ones in the middle of a
block, as many as agree are shared by copying: the worker copies that block to one of the request's own before the
step's forward pass, and only what differs is computed. RadixAttention (SGLang, Zheng et al., NeurIPS 2024) shares at
every token because its pages hold one token; copying does so with pages that suit the attention kernels.

Within a run of the cache the only full block that can follow is the run's next one. Where a request's tokens leave
the cached ones at the end of a run, candidates are found by the key of the block before them (the root's key for first
blocks), so by everything before them, the model and the scope; whoever has another scope finds nothing, not even a
first token. Those with the same predecessor are sorted by their tokens: the one that agrees longest is a neighbour of
the tokens looked for.

Besides full blocks, the last, partly filled block of a sequence that has ended is kept; nobody could share it as it is,
so it is a *tail*.

Only *proven* blocks are copied from: a token was sampled, and was finite, from a sequence that reads them. What a
failed row wrote is NaN and would have made that token NaN; so a copy never spreads what a row spoilt, and need not be
traced back when a row fails. It also means that the step that wrote them was answered before any copy is planned.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.arrays import IndexArray
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import BlockKey


class PartialMatch(NamedTuple):
    """A block that begins as a request goes on."""

    block: int
    num_tokens: int
    """Leading tokens that agree."""


class PartialBlocks:
    """Which blocks of one worker are proven, and those that begin runs, and tails, by what comes before them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.least_tokens = max(1, block_size // 4)
        """A copy moves a whole block in every layer, so fewer tokens than these are computed instead."""
        self.block_size = block_size
        self._followers: dict[BlockKey, list[tuple[bytes, int]]] = {}
        """By the key of the block before: (tokens as int32, block), ascending."""
        self._entries: dict[int, tuple[BlockKey, bytes]] = {}
        """By block: the key of the block before it, and its tokens."""
        self.proven = np.zeros(num_blocks, np.bool_)
        """Blocks that can be copied from; to be read only."""
        self.tails = np.zeros(num_blocks, np.bool_)
        """Those of them that are not full; to be read only."""
        self.listed = np.zeros(num_blocks, np.bool_)
        """Those of them that `find` finds; to be read only."""

    def find(self, before: BlockKey, tokens: bytes) -> PartialMatch | None:
        """The block after `before` that agrees longest with `tokens` (int32), if it is worth a copy."""
        followers = self._followers.get(before)
        if followers is None or len(tokens) < TOKEN_BYTES * self.least_tokens:
            return None
        position = bisect_left(followers, (tokens, -1))
        best = max(followers[max(0, position - 1) : position + 1], key=lambda each: num_common(each[0], tokens))
        num_tokens = num_common(best[0], tokens)
        return PartialMatch(best[1], num_tokens) if num_tokens >= self.least_tokens else None

    def prove(self, blocks: IndexArray) -> None:
        """From now on the full blocks can be copied from."""
        self.proven[blocks] = True

    def add_tail(self, before: BlockKey, tokens: bytes, block: int) -> None:
        """From now on the block, whose beginning holds the KV of `tokens`, can be copied from."""
        self.proven[block] = self.tails[block] = True
        self.list(before, tokens, block)

    def list(self, before: BlockKey, tokens: bytes, block: int) -> None:
        """From now on the block is found; it is proven and holds the KV of `tokens`."""
        assert self.proven[block]
        assert not self.listed[block]
        self.listed[block] = True
        self._entries[block] = (before, tokens)
        insort(self._followers.setdefault(before, []), (tokens, block))

    def forget(self, blocks: IndexArray) -> None:
        """The blocks' memory is needed, or their content cannot be trusted."""
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
        """Checks that index and arrays agree."""
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
    """How many leading tokens (int32) agree."""
    same, most = 0, min(len(some), len(others)) // TOKEN_BYTES
    if some.startswith(others[: TOKEN_BYTES * most]):
        return most
    # What agrees up to a token agrees before it, so the first difference can be searched for by halving.
    while most - same > 1:
        middle = (same + most) // 2
        if some.startswith(others[: TOKEN_BYTES * middle]):
            same = middle
        else:
            most = middle
    return same
