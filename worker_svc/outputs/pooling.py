"""Embeddings: pools the last hidden states of a row's tokens into one vector.

A row that pools is computed like any prompt, in chunks together with rows that generate, but it samples no token. LAST
uses the last token's hidden state. MEAN sums the hidden states chunk by chunk, in float32 on the device. The sum is
lost when the row leaves, so a readmitted row starts at its first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.interface.arrays import FloatArray
from worker_svc.interface.plan import Pooling
from worker_svc.interface.result import RowEmbedding

NOT_FINITE = "the model's hidden states are not finite"


@dataclass(frozen=True, slots=True)
class PooledPart:
    """One chunk's contribution to its row's vector."""

    row: int
    generation: int
    first: int
    """Place in the batch of the first token to sum."""
    num_tokens: int
    divisor: int
    """Number of hidden states in the mean if this chunk completes the vector, otherwise 0."""


class PoolingRows:
    """Pooling modes and partial sums of all rows."""

    def __init__(self, max_rows: int) -> None:
        self._modes = np.zeros(max_rows, np.int8)
        self._num_rows = 0
        self._sums: dict[int, torch.Tensor] = {}

    def admit(self, row: int, mode: Pooling) -> None:
        """Admit a row, which pools unless `mode` is NONE."""
        if mode is not Pooling.NONE:
            self._modes[row] = mode
            self._num_rows += 1

    def leave(self, row: int) -> None:
        """Forget a row that leaves."""
        if self._modes[row]:
            self._modes[row] = 0
            self._num_rows -= 1
            self._sums.pop(row, None)

    def pools(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        pools: npt.NDArray[np.bool_] = self._modes[rows] != 0
        return pools

    def parts(
        self,
        rows: Sequence[int],
        generations: Sequence[int],
        firsts: Sequence[int],
        lengths: Sequence[int],
        ends: Sequence[int],
        finished: Sequence[bool],
    ) -> tuple[PooledPart, ...]:
        """Return the contributions of one step's chunks.

        Args:
            rows: the rows with a chunk.
            generations: the generations of the rows.
            firsts: place of each chunk's first token in the batch.
            lengths: number of tokens of each chunk.
            ends: each row's number of computed tokens, including this chunk.
            finished: whether the chunk is its row's last one.
        """
        if not self._num_rows:
            return ()
        found = []
        for row, generation, first, length, end, is_done in zip(
            rows, generations, firsts, lengths, ends, finished, strict=True
        ):
            if self._modes[row] == Pooling.MEAN:
                found.append(PooledPart(row, generation, first, length, end if is_done else 0))
            elif self._modes[row] == Pooling.LAST and is_done:
                found.append(PooledPart(row, generation, first + length - 1, 1, 1))
        return tuple(found)

    def pool(self, hidden: torch.Tensor, parts: Sequence[PooledPart]) -> torch.Tensor | None:
        """Sum hidden states, and return the vectors that these parts complete, in order.

        Args:
            hidden: `[H, hidden_size]`, the hidden states of the parts' tokens.
            parts: the parts, in the order of `hidden`.

        Returns:
            `[E, hidden_size] float32`; None when no vector is complete.
        """
        vectors, line = [], 0
        for part in parts:
            total = hidden[line : line + part.num_tokens].sum(dim=0, dtype=torch.float32)
            line += part.num_tokens
            before = self._sums.pop(part.row, None)
            if before is not None:
                total += before
            if part.divisor:
                vectors.append(total / part.divisor)
            else:
                self._sums[part.row] = total
        return torch.stack(vectors) if vectors else None


def completed(
    vectors: FloatArray | None, parts: Sequence[PooledPart]
) -> tuple[tuple[RowEmbedding, ...], list[PooledPart]]:
    """Return the finite ones of the complete vectors `[E, hidden_size]`.

    Returns:
        The embeddings, and the parts with non-finite vectors, whose rows have failed.
    """
    if vectors is None:
        return (), []
    complete = [part for part in parts if part.divisor]
    found, failed = [], []
    for part, values in zip(complete, vectors, strict=True):
        if np.isfinite(values).all():
            found.append(RowEmbedding(part.row, part.generation, values))
        else:
            failed.append(part)
    return tuple(found), failed
