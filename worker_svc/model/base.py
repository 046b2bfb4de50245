"""Interface between a decoder and the rest of the worker.

A model computes one step's flat batch: T tokens from R rows, concatenated. It writes their keys and values into the
given slots, attends over block tables, and returns logits only for the tokens in `logits_index`. It does not depend on
the row table, plans, sampling or pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.paged_attention import DecodeSchedule, schedule_decode
from worker_svc.interface.arrays import IntArray
from worker_svc.model.recurrent import RowStates, StateCounts, StateSave

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each `[num_blocks, num_kv_heads, block_size, width]`."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the keys and values that one layer stores per token."""

    num_kv_heads: int
    head_dim: int
    """Elements of a key."""
    value_dim: int = 0
    """Number of elements in a value; 0 means the same number as in a key."""

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of elements in a key and in a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def is_latent(self) -> bool:
        """Whether a token has one latent vector and one rotary key for all heads."""
        return self.num_kv_heads == 1 and len(set(self.widths)) > 1


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Places of a step's tokens in the KV cache; the tensors are on the model's device."""

    slot_mapping: torch.Tensor
    """`[T] int64`: slot for each token's key and value (block ID * block size + offset)."""
    block_tables: torch.Tensor
    """`[R, max_blocks] int32`: block IDs of each row."""
    query_start: torch.Tensor
    """`[R + 1] int32`: row r owns tokens query_start[r] .. query_start[r + 1]."""
    context_lens: torch.Tensor
    """`[R] int32`: tokens of each row including this step's."""
    max_query_len: int
    """Maximum number of tokens per row in this step."""
    min_query_len: int = 1
    """Minimum number of tokens per row in this step; 1 if unknown."""
    num_leading_decodes: int = 0
    """Number of leading rows with at most one token each; not used if `max_query_len` is 1."""
    rows: IntArray | None = None
    """`[R]`, on the host: the rows' indices in the row table, which are also those of their recurrent states.

    None for rows without a state in a trial or a profile, which begin with their first token.
    """
    saves: tuple[StateSave, ...] = ()
    """Recurrent states to save within the step."""
    drafting: tuple[int, ...] = ()
    """Rows with drafts, whose recurrent states are copied before the step."""
    table_numbers: tuple[int, ...] = ()
    """Number of each layer's slot mapping and block table: 0 for those above; empty if all layers use these."""
    windowed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Slot mappings `[n, T] int64` and block tables `[n, R, max_blocks] int32` with the numbers from 1 on.

    None with one KV group. Entries of tables in front of the window are not valid.
    """

    def places(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slot mapping and the block tables of a layer."""
        if self.windowed is None or not (number := self.table_numbers[layer]):
            return self.slot_mapping, self.block_tables
        slots, tables = self.windowed
        return slots[number - 1], tables[number - 1]

    def schedule(self, sliding_window: int | None, num_kv_heads: int) -> DecodeSchedule | None:
        """Return the split of decode rows' keys among GPU programs, for all layers with these parameters.

        None if no row is in decode, or if the kernels do not need a schedule.
        """
        if self.min_query_len > 1:
            return None
        return schedule_decode(
            self.query_start, self.context_lens, num_kv_heads=num_kv_heads, sliding_window=sliding_window
        )


class Model(Protocol):
    """A decoder with a paged KV cache."""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Each layer's KV shape, in the order of the `caches` in `forward`."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, tokens; None for a layer without one.

        Empty if all layers must use the same block tables.
        """
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes per row of recurrent state; 0 if a row has only keys and values.

        If it is above 0, `allocate_states` must be called before `forward`.
        """
        ...

    def allocate_states(self, counts: StateCounts) -> None:
        """Allocate a worker's recurrent states. Without `state_bytes`, do nothing."""
        ...

    @property
    def states(self) -> RowStates | None:
        """The allocated recurrent states; None without any."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether any step can be captured in a CUDA graph; if not, a trial shows whether a decode step can.

        Then `forward` only enqueues work, which depends only on the shapes of its arguments.
        """
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute one step.

        Args:
            input_ids: `[T] int64`.
            positions: `[T] int64`, absolute position of each token in its row.
            attention: the places of the tokens in the KV cache.
            caches: the keys and values of each layer.
            logits_index: `[S] int64`, places of the tokens to return logits for, in order; None for all T tokens.

        Returns:
            Logits `[S, vocab_size]` in the model's dtype or float32.
        """
        ...

    @property
    def hidden_size(self) -> int:
        """Number of elements in a token's last hidden state; 0 means that `forward_hidden` must not be called."""
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
        """Compute one step as `forward` does, and also return last hidden states (the inputs of the LM head).

        Args:
            input_ids: as in `forward`.
            positions: as in `forward`.
            attention: as in `forward`.
            caches: as in `forward`.
            logits_index: as in `forward`.
            hidden_index: `[H] int64`, places of the tokens to return hidden states for.

        Returns:
            The logits of `forward`, and hidden states `[H, hidden_size]` in the model's dtype or float32.
        """
        ...
