"""Embeddings: the last hidden states of a row's tokens, made into one vector.

A row that pools is computed as any prompt is, in chunks beside rows that generate, and samples nothing. LAST takes the
hidden state of its last token. MEAN adds up, chunk by chunk, in float32 on the device; what was added up is lost with
the row, so that one which is admitted again begins at its first token. A step without such rows costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from protos.quire.plan.v1 import plan_pb2
from worker_svc.errors import PlanError

NOT_FINITE = "the model's hidden states are not finite"

_LAST, _MEAN = plan_pb2.POOLING_LAST, plan_pb2.POOLING_MEAN


@dataclass(frozen=True, slots=True)
class PooledPart:
    """What one chunk adds to the vector of its row."""

    row: int
    generation: int
    first: int
    """Place in the batch of the first of its tokens that count."""
    num_tokens: int
    divisor: int
    """How many hidden states the vector is the mean of, if it is complete with this chunk; otherwise 0."""


class PoolingRows:
    """Which rows pool, and what was added up for them so far."""

    def __init__(self, max_rows: int, hidden_size: int) -> None:
        """`hidden_size` is 0 where the model gives no hidden states out: then no row pools."""
        self._hidden_size = hidden_size
        self._modes = np.zeros(max_rows, np.int8)
        self._num_rows = 0
        self._sums: dict[int, torch.Tensor] = {}

    def admit(self, row: int, admission: plan_pb2.Admission) -> None:
        """A row arrives.

        Raises:
            PlanError: it is to be pooled in a way that there is not, or cannot be.
        """
        mode = admission.pooling
        if not mode:
            return
        if mode not in (_LAST, _MEAN) or not self._hidden_size or admission.grammar:
            raise PlanError(f"admission: pooling {mode} of {self._hidden_size} elements, or with a grammar")
        if mode == _MEAN and admission.num_computed_tokens:
            raise PlanError("admission: a mean over tokens of which some are computed already")
        self._modes[row] = mode
        self._num_rows += 1

    def leave(self, row: int) -> None:
        """A row is free again."""
        if self._modes[row]:
            self._modes[row] = 0
            self._num_rows -= 1
            self._sums.pop(row, None)

    def pools(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """For each row whether it pools."""
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
        """What the chunks of one step add to vectors.

        Args:
            rows, generations: the rows with a chunk.
            firsts: place of each chunk's first token in the batch.
            lengths: tokens of each chunk.
            ends: tokens of each row that are computed with it.
            finished: whether those are all.
        """
        if not self._num_rows:
            return ()
        found = []
        for row, generation, first, length, end, is_done in zip(
            rows, generations, firsts, lengths, ends, finished, strict=True
        ):
            if self._modes[row] == _MEAN:
                found.append(PooledPart(row, generation, first, length, end if is_done else 0))
            elif self._modes[row] == _LAST and is_done:
                found.append(PooledPart(row, generation, first + length - 1, 1, 1))
        return tuple(found)

    def pool(self, hidden: torch.Tensor, parts: Sequence[PooledPart]) -> torch.Tensor | None:
        """The vectors that are complete with these parts, in their order.

        Args:
            hidden: `[H, hidden_size]`, the hidden states of the parts' tokens.
            parts: what they are parts of.

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


def encode(
    vectors: npt.NDArray[np.float32] | None, parts: Sequence[PooledPart], result: plan_pb2.StepResult
) -> list[PooledPart]:
    """Writes the vectors `[E, hidden_size]` of the parts that complete one into the result; returns the parts whose
    vectors are not finite, which failed."""
    failed: list[PooledPart] = []
    if vectors is None:
        return failed
    complete = [part for part in parts if part.divisor]
    for part, values in zip(complete, vectors, strict=True):
        if np.isfinite(values).all():
            values = values.astype("<f4", copy=False)
            result.embeddings.add(row=part.row, generation=part.generation, values=values.tobytes())
        else:
            failed.append(part)
    return failed
