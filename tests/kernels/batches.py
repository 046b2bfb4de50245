"""Paged batches for attention tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kernels.kv_quantised import GROUP, INT4, QUANTISED, from_quantised, to_quantised


@dataclass(frozen=True)
class PagedBatch:
    """The tensors of one attention call, and the dense keys and values that the pages were filled from."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # per row: keys and values [num_kv_heads, context, head_dim]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the batch."""
        return (
            self.query,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start,
            self.context_lens,
        )


def with_released_blocks(batch: PagedBatch, window: int) -> PagedBatch:
    """Return the batch with NaN in the blocks in front of windows, and with another such block in the tables."""
    block_size, released = batch.k_cache.shape[2], len(batch.k_cache)
    k_cache, v_cache = (
        torch.cat((cache, cache.new_full((1, *cache.shape[1:]), torch.nan))) for cache in (batch.k_cache, batch.v_cache)
    )
    block_tables = batch.block_tables.clone()
    lengths = batch.query_start.diff().tolist()
    for row, (context, length) in enumerate(zip(batch.context_lens.tolist(), lengths, strict=True)):
        num_released = max(0, context - length - window + 1) // block_size
        for cache in (k_cache, v_cache):
            cache[block_tables[row, :num_released].long()] = torch.nan
        block_tables[row, :num_released] = released
    return replace(batch, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables)


def paged_batch(
    rows: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    """A batch with rows given as (context, query length), on scattered pages; if quantised, queries are float32.

    Every cache slot outside the rows holds NaN, and block tables point far outside beyond a row's
    last page, so that an implementation that reads too much fails.
    """
    if dtype in QUANTISED:
        batch = paged_batch(
            rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, seed=seed
        )
        return with_quantised_cache(batch, dtype)
    generator = torch.Generator().manual_seed(seed)
    max_pages = max(-(-context // block_size) for context, _ in rows) + 1
    num_blocks = len(rows) * max_pages + 1
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype)
    v_cache = torch.full(shape, torch.nan, dtype=dtype)
    block_tables = torch.full((len(rows), max_pages), 1 << 30, dtype=torch.int32)
    dense = []
    for row, (context, _) in enumerate(rows):
        keys, values = torch.randn(2, num_kv_heads, context, head_dim, generator=generator).to(dtype)
        dense.append((keys, values))
        for page in range(-(-context // block_size)):
            block = next(free)
            block_tables[row, page] = block
            here = slice(page * block_size, min((page + 1) * block_size, context))
            used = here.stop - here.start
            k_cache[block, :, :used] = keys[:, here]
            v_cache[block, :, :used] = values[:, here]
    query_lens = [query_len for _, query_len in rows]
    return PagedBatch(
        query=torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        max_query_len=max(query_lens),
        dense=dense,
    )


def head_dims(dtype: torch.dtype) -> list[int]:
    """Head dimensions that every CPU kernel level supports with this cache type."""
    return [32, 64, 96, 128] if dtype == INT4 else [16, 64, 80, 128]


def quantised_types(head_dim: int) -> list[torch.dtype]:
    """Quantised cache types that support heads of this size."""
    return [dtype for dtype in QUANTISED if dtype != INT4 or head_dim % GROUP == 0]


def as_float64(batch: PagedBatch) -> tuple[torch.Tensor, ...]:
    """The batch's tensors with query and cache widened, so that the reference does not round."""
    caches = (_wide(cache) for cache in (batch.k_cache, batch.v_cache))
    return (batch.query.double(), *caches, *batch.tensors[3:])


def with_quantised_cache(batch: PagedBatch, dtype: torch.dtype) -> PagedBatch:
    """The batch with a quantised cache; slots outside the rows remain NaN."""
    return replace(batch, k_cache=to_quantised(batch.k_cache, dtype), v_cache=to_quantised(batch.v_cache, dtype))


def _wide(cache: torch.Tensor) -> torch.Tensor:
    return (from_quantised(cache) if cache.dtype in QUANTISED else cache).double()
