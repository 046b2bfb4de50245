"""Batches for tests of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.kv_quantised import QUANTISED, from_quantised, to_quantised


@dataclass(frozen=True)
class LatentBatch:
    """The tensors of one call."""

    query: torch.Tensor
    latent_cache: torch.Tensor
    rotary_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the batch."""
        caches = (self.latent_cache, self.rotary_cache)
        return (self.query, *caches, self.block_tables, self.query_start, self.context_lens)

    @property
    def exact(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors with query and caches in float64."""
        caches = (
            (from_quantised(cache) if cache.dtype in QUANTISED else cache).double()
            for cache in (self.latent_cache, self.rotary_cache)
        )
        return (self.query.double(), *caches, *self.tensors[3:])


def latent_batch(
    rows: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    rank: int = 64,
    rotary_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LatentBatch:
    """Return a batch with rows given as (context, query length), on scattered pages.

    Queries are float32 if the cache is quantised. Every slot outside the rows holds NaN, and block tables point far
    outside beyond a row's last page.
    """
    generator = torch.Generator().manual_seed(seed)
    max_pages = max(-(-context // block_size) for context, _ in rows) + 1
    free = iter(torch.randperm(len(rows) * max_pages + 1, generator=generator).tolist())
    float_type = torch.float32 if dtype in QUANTISED else dtype
    shape = (len(rows) * max_pages + 1, 1, block_size)
    caches = [torch.full((*shape, width), torch.nan, dtype=float_type) for width in (rank, rotary_dim)]
    block_tables = torch.full((len(rows), max_pages), 1 << 30, dtype=torch.int32)
    for row, (context, _) in enumerate(rows):
        for page in range(-(-context // block_size)):
            block = next(free)
            block_tables[row, page] = block
            used = min(block_size, context - page * block_size)
            for cache in caches:
                cache[block, 0, :used] = torch.randn(used, cache.shape[3], generator=generator).to(float_type)
    if dtype in QUANTISED:
        caches = [to_quantised(cache, dtype) for cache in caches]
    lengths = [length for _, length in rows]
    return LatentBatch(
        query=torch.randn(sum(lengths), num_heads, rank + rotary_dim, generator=generator).to(float_type),
        latent_cache=caches[0],
        rotary_cache=caches[1],
        block_tables=block_tables,
        query_start=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        max_query_len=max(lengths),
    )
