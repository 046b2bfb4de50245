"""Limits of a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the worker's memory and computation, as sent to the scheduler in Hello."""

    max_rows: int
    max_tokens_per_step: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    block_bytes: int = 0
    """Bytes of the KV in a block, on one rank."""
    cache_kinds: tuple[str, ...] = ()
    """Kinds of cache that the worker stores: "full", "latent", "window", "state"."""
    num_kv_groups: int = 1
    window: int = 0
    """Number of tokens that a token attends to in KV groups after the first, including itself; 0 with one group."""
    window_chunk: int = 0
    """Maximum number of tokens of one row in a step; 0 with one group."""
    hidden_size: int = 0
    """Number of elements in a token's last hidden state; 0 if the model does not return hidden states."""
    max_draft_tokens: int = 0
    """Most draft tokens per row and step; 0 if the worker does not speculate."""
    state_bytes: int = 0
    """Bytes per row of recurrent state; 0 if a row has only keys and values."""
    num_checkpoints: int = 0
    """Number of checkpoints of recurrent states."""
    num_host_states: int = 0
    """Number of recurrent states in host memory, numbered after the checkpoints."""

    @property
    def state_blocks(self) -> int:
        """Number of blocks as which the copy of a recurrent state counts: those of the same size."""
        return -(-self.state_bytes // self.block_bytes) if self.block_bytes else min(1, self.state_bytes)

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of the longest sequence, plus one for schedulers that reserve a block ahead."""
        return -(-self.max_model_len // self.block_size) + 1
