"""Retained sequences: what the KV blocks contain after the rows of a session were dropped.

When a session is lost, the rows are dropped but their KV stays in the blocks. The next Hello reports the tokens of
these rows and their blocks, so that the scheduler does not compute them again. The tokens of a step are only appended
to a list here; they are sorted by row when the list is long, and when a session is lost.
"""

from dataclasses import dataclass

import numpy as np

from worker_svc.interface.arrays import Int32Array, IntArray

_MOST_STEPS = 512
_MOST_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Retained:
    """A sequence whose KV is in the blocks."""

    prefix_root: bytes
    """Key before its first block in the scheduler's prefix cache."""
    token_ids: Int32Array
    """Its first tokens, as many as have KV in the blocks."""
    blocks: Int32Array
    is_proven: bool
    """Whether a token was sampled from the whole sequence."""


class KnownTokens:
    """All known tokens of each row: those of its admission, and those that it sampled since."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, list[Int32Array]]] = {}
        """By row, its generation and its tokens in parts."""
        self._sampled: list[tuple[IntArray, IntArray, Int32Array]] = []
        """Rows, generations and tokens of the last steps."""
        self._num_sampled = 0

    def admit(self, row: int, generation: int, tokens: Int32Array) -> None:
        """Begin a row with the tokens of its admission."""
        self._parts[row] = (generation, [tokens])

    def sampled(self, rows: IntArray, generations: IntArray, tokens: Int32Array) -> None:
        """Add the tokens that a step sampled, in order for each row."""
        if not len(rows):
            return
        self._sampled.append((rows, generations, tokens))
        self._num_sampled += len(rows)
        if len(self._sampled) >= _MOST_STEPS or self._num_sampled >= _MOST_TOKENS:
            self._sort()

    def leave(self, row: int) -> None:
        """Forget a row."""
        self._parts.pop(row, None)

    def tokens(self, row: int) -> Int32Array:
        """Return all known tokens of a row in use."""
        self._sort()
        _, parts = self._parts[row]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0]

    def clear(self) -> None:
        """Forget all rows."""
        self._parts.clear()
        self._sampled.clear()
        self._num_sampled = 0

    def _sort(self) -> None:
        """Append the sampled tokens to their rows. A row that another request uses by now gets none of them."""
        if not self._sampled:
            return
        rows, generations, tokens = (np.concatenate(columns) for columns in zip(*self._sampled, strict=True))
        self._sampled.clear()
        self._num_sampled = 0
        order = np.argsort(rows, kind="stable")
        rows, generations, tokens = rows[order], generations[order], tokens[order]
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(rows)], strict=True):
            known = self._parts.get(int(rows[first]))
            if known is not None:
                current = generations[first:end] == known[0]
                known[1].append(tokens[first:end][current].astype(np.int32))
