"""The part of each weight that one rank has, as in Megatron-LM (Shoeybi et al., 2019).

Query, key, value, gate and up projections are divided by outputs; the output and down projections by inputs, so that
the sum of all ranks' results is the result. A rank has whole heads. If there are more ranks than KV heads, several
ranks have a copy of the same KV head. The embedding and the LM head are divided by vocabulary indices.
"""

from dataclasses import dataclass

import torch

from shared.config import ConfigError

_VOCAB_UNIT = 64
"""Parts of the vocabulary begin at multiples of this, because kernels draw noise for blocks of vocabulary indices."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of indices."""

    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a checkpoint's tensor that a rank reads: a range of indices of one dimension."""

    dim: int
    span: Span
    whole: int
    """Size of this dimension in the checkpoint."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole tensor."""
        return tensor.narrow(self.dim, self.span.begin, self.span.length)

    def times(self, count: int) -> "Cut":
        """Return the cut for `count` adjacent elements per index, such as those of a head."""
        span = Span(self.span.begin * count, self.span.length * count)
        return Cut(self.dim, span, self.whole * count)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `size`; by default the whole."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> Span:
        """Return this rank's part of `total` indices, which `size` divides."""
        length = total // self.size
        return Span(self.rank * length, length)

    def kv_heads(self, num_kv_heads: int) -> Span:
        """Return this rank's KV heads; with more ranks than heads, neighbouring ranks have the same one."""
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads)
        return Span(self.rank * num_kv_heads // self.size, 1)

    def vocabulary(self, vocab_size: int) -> Span:
        """Return this rank's vocabulary indices; the last part may be shorter than the others."""
        if self.size == 1:
            return Span(0, vocab_size)
        length = -(-vocab_size // (self.size * _VOCAB_UNIT)) * _VOCAB_UNIT
        begin = self.rank * length
        return Span(begin, max(0, min(length, vocab_size - begin)))

    def check(self, *, num_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int) -> None:
        """Check that the sizes of a model can be divided among the ranks.

        Raises:
            ConfigError: a size cannot be divided.
        """
        size = self.size
        for what, count in (("query heads", num_heads), ("inner elements of the MLP", intermediate_size)):
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size: {size} does not divide the model's {count} {what}; give a divisor"
                )
        if num_kv_heads % size and size % num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size: {size} ranks cannot share {num_kv_heads} KV heads evenly; give a divisor or a"
                f" multiple of {num_kv_heads}"
            )
        if not Shard(size - 1, size).vocabulary(vocab_size).length:
            raise ConfigError(
                f"tensor_parallel_size: {size} ranks are too many for a vocabulary of {vocab_size}; give fewer"
            )


WHOLE = Shard()
"""The only part of a model without tensor parallelism."""
