"""The contract between a decoder and the rest of the worker.

A model computes the flat batch of one step: T tokens of R rows, concatenated. It writes their keys and values into the
slots it is given, attends over block tables, and returns logits only where a row samples. It knows nothing of rows,
plans, sampling or pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.paged_attention import DecodeSchedule, schedule_decode

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each `[num_blocks, num_kv_heads, block_size, head_dim]`."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer stores per token."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of a step lie in the cache; the tensors are on the model's device."""

    slot_mapping: torch.Tensor
    """`[T] int64`: slot each token's key and value go to."""
    block_tables: torch.Tensor
    """`[R, max_blocks] int32`."""
    query_start: torch.Tensor
    """`[R + 1] int32`: row r owns tokens query_start[r] .. query_start[r + 1]."""
    context_lens: torch.Tensor
    """`[R] int32`: tokens of each row including this step's."""
    max_query_len: int
    """Most tokens of one row in this step."""
    min_query_len: int = 1
    """Fewest tokens of one row in this step; 1 where that is not known."""
    num_leading_decodes: int = 0
    """The first rows, so many of them, are known to bring one token each; all rows do where `max_query_len` is 1."""

    def schedule(self, sliding_window: int | None, num_kv_heads: int) -> DecodeSchedule | None:
        """How the keys of rows in decode are shared among programs, for all layers of this kind; None where no row is
        in decode, or no kernel needs it."""
        if self.min_query_len > 1:
            return None
        return schedule_decode(
            self.query_start, self.context_lens, num_kv_heads=num_kv_heads, sliding_window=sliding_window
        )


class Model(Protocol):
    """A decoder over paged KV."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer stores, in the order of the caches that `forward` takes."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a step that only decodes can be captured in a graph: `forward` then only enqueues work, and which
        follows from the shapes of its arguments."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes one step.

        Args:
            input_ids: `[T] int64`.
            positions: `[T] int64`, absolute position of each token in its row.
            attention: where the tokens lie.
            caches: one pair per layer.
            logits_index: `[S] int64`, the tokens whose logits are wanted, in the order wanted; None: all T.

        Returns:
            Logits `[S, vocab_size]` in the model's dtype or float32.
        """
        ...

    @property
    def hidden_size(self) -> int:
        """Elements of a last hidden state; 0: `forward_hidden` must not be called."""
        ...

    def forward_hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor,
        hidden_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and the last hidden states, what the head is applied to, of the tokens in `hidden_index`.

        Args:
            input_ids, positions, attention, caches, logits_index: as in `forward`.
            hidden_index: `[H] int64`.

        Returns:
            Logits as `forward` does, and hidden states `[H, hidden_size]` in the model's dtype or float32.
        """
        ...
