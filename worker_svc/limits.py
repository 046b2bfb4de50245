"""The numbers that bound a worker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the worker can hold and compute; the same numbers that Hello tells the scheduler."""

    max_rows: int
    max_tokens_per_step: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    num_host_blocks: int = 0
    num_kv_groups: int = 1
    hidden_size: int = 0
    """Elements of a last hidden state; 0: the model gives none out."""

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks for the longest sequence and one more, for schedulers that reserve ahead."""
        return -(-self.max_model_len // self.block_size) + 1
