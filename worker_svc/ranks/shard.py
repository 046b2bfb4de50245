"""One rank's part of each weight, as in Megatron-LM (Shoeybi et al., 2019).

Query, key, value, gate and up projections are divided by outputs. Output and down projections are divided by inputs, so
that the sum over all ranks is the result. A rank has whole heads. If the number of ranks does not divide the KV heads,
a rank copies the KV head of each group of its query heads. The embedding and the LM head are divided by vocabulary
indices.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shared.config import ConfigError

_VOCAB_UNIT = 64
"""Vocabulary parts begin at multiples of this, because kernels generate noise for blocks of vocabulary indices."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of indices."""

    begin: int
    length: int


def spans_of(indices: Iterable[int]) -> tuple[Span, ...]:
    """Return ranges that contain these indices in order."""
    spans: list[Span] = []
    for index in indices:
        if spans and index == spans[-1].begin + spans[-1].length:
            spans[-1] = Span(spans[-1].begin, spans[-1].length + 1)
        else:
            spans.append(Span(index, 1))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a checkpoint tensor that a rank reads: index ranges in one dimension, in order."""

    dim: int
    spans: tuple[Span, ...]
    whole: int
    """Size of this dimension in the checkpoint."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole tensor, as a view if there is one range."""
        parts = [tensor.narrow(self.dim, span.begin, span.length) for span in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def times(self, count: int) -> "Cut":
        """Return the cut for `count` adjacent elements per index, such as those of a head."""
        spans = tuple(Span(span.begin * count, span.length * count) for span in self.spans)
        return Cut(self.dim, spans, self.whole * count)

    def twice(self) -> "Cut":
        """Return the cut for two tensors of this size stored as one, such as gate and up projections."""
        second = tuple(Span(self.whole + span.begin, span.length) for span in self.spans)
        return Cut(self.dim, self.spans + second, 2 * self.whole)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `size`; by default the whole."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> Span:
        """Return this rank's part of `total` indices, which `size` divides."""
        length = total // self.size
        return Span(self.rank * length, length)

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
        """Return this rank's KV heads in order, each for equally many of its query heads.

        A head occurs more than once, on one rank or on several, if the ranks do not divide the KV heads.
        """
        per_kv_head = num_heads // num_kv_heads
        own = self.span(num_heads)
        together = math.gcd(per_kv_head, own.length)
        return tuple((own.begin + place) // per_kv_head for place in range(0, own.length, together))

    def vocabulary(self, vocab_size: int) -> Span:
        """Return this rank's vocabulary indices; the last part may be shorter than the others."""
        if self.size == 1:
            return Span(0, vocab_size)
        length = -(-vocab_size // (self.size * _VOCAB_UNIT)) * _VOCAB_UNIT
        begin = self.rank * length
        return Span(begin, max(0, min(length, vocab_size - begin)))

    def check(self, *, num_heads: int, intermediate_size: int, vocab_size: int) -> None:
        """Check that the sizes of a model can be divided among the ranks.

        Raises:
            ConfigError: a size cannot be divided.
        """
        size = self.size
        for what, count in (("query heads", num_heads), ("inner elements of the MLP", intermediate_size)):
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size: {size} does not divide the model's {count} {what}; use a divisor"
                )
        if not Shard(size - 1, size).vocabulary(vocab_size).length:
            raise ConfigError(
                f"tensor_parallel_size: {size} ranks are too many for a vocabulary of {vocab_size}; use fewer"
            )


WHOLE = Shard()
"""The only part of a model without tensor parallelism."""
