"""Launches latent attention on a GPU: chooses tiles for a batch.

The launches depend only on values that the host knows, so they can be captured in a graph: the numbers of tokens, rows
and heads, the longest chunk, and the width of the block tables.
"""

from __future__ import annotations

import torch

from kernels._dispatch import architecture, next_power_of_2, num_multiprocessors
from kernels.fp8 import native_fp8
from kernels.gpu.latent_attention import latent_attention_kernel
from kernels.kv_quantised import INT4, QUANTISED, head_size
from kernels.paged_attention.launch import MOST_PARTS, parts_of_keys
from kernels.paged_attention.prefill import combine_parts_kernel

_LARGE_SHARED_MEMORY = (80, 90, 100, 103)
"""Architectures with at least 163 KiB of shared memory per program."""


def latent_attention_triton(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> torch.Tensor:
    """Compute `latent_attention` for CUDA tensors without reading a value back from the device."""
    num_tokens, num_heads, _ = query.shape
    num_rows, block_size = context_lens.shape[0], latent_cache.shape[2]
    rank, rotary_dim = head_size(latent_cache), head_size(rotary_cache)
    int8, pair = latent_cache.dtype == torch.int8, 1
    if latent_cache.dtype in QUANTISED:  # read in pairs
        pair = 2
        kind = torch.uint8 if latent_cache.dtype == INT4 else torch.uint16
        latent_cache, rotary_cache = latent_cache.view(kind), rotary_cache.view(kind)
    block_m, block_n, num_warps, num_stages = _tiles(query, max_query_len, pair)
    # In decode, each row has one query, so a tile holds heads only.
    heads_tile = block_m if max_query_len == 1 else min(block_m, next_power_of_2(num_heads))
    queries = block_m // heads_tile
    num_tiles = num_tokens // queries + num_rows if num_rows > 1 else -(-num_tokens // queries)
    head_tiles = -(-num_heads // heads_tile)
    num_used = num_tokens if max_query_len == 1 else num_tiles  # the other programs return at once
    num_parts = parts_of_keys(num_used * head_tiles, num_multiprocessors(query), block_tables.shape[1] * block_size)
    split = (num_parts, num_tokens) if num_parts > 1 else (0, 0)
    out = torch.empty(num_tokens, num_heads, rank, dtype=query.dtype, device=query.device)
    partial = torch.empty(*split, num_heads, rank, dtype=torch.float32, device=query.device)
    lse = torch.empty(*split, num_heads, dtype=torch.float32, device=query.device)
    smallest = 16 * pair  # a product needs 16 elements
    latent_attention_kernel[(num_tiles, head_tiles, num_parts)](
        query,
        latent_cache,
        rotary_cache,
        block_tables,
        query_start,
        context_lens,
        out,
        partial,
        lse,
        num_tokens,
        num_rows,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        float(scale),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        RANK=rank,
        RANK_TILE=max(smallest, next_power_of_2(rank)),
        ROTARY_DIM=rotary_dim,
        ROTARY_TILE=max(smallest, next_power_of_2(rotary_dim)),
        NATIVE_FP8=native_fp8(query),
        INT8=int8,
        HEADS_TILE=heads_tile,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_parts > 1:
        combine_parts_kernel[(num_tokens, num_heads)](
            partial,
            lse,
            out,
            num_tokens,
            num_parts,
            NUM_HEADS=num_heads,
            HEAD_DIM=rank,
            DIM_TILE=next_power_of_2(rank),
            PARTS_TILE=MOST_PARTS,
        )
    return out


def _tiles(query: torch.Tensor, max_query_len: int, pair: int) -> tuple[int, int, int, int]:
    """Return queries and keys of a tile, warps and stages: no spills for a rank of 512, and little shared memory."""
    if query.dtype == torch.float32:
        return 16, 16, 8, 1
    large = architecture(query) in _LARGE_SHARED_MEMORY
    if max_query_len == 1:
        return 16, 32 if large and pair == 1 else 16, 4, 2
    return 32, 32 if large and pair == 1 else 16, 8, 2
