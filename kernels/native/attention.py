"""Paged attention on a CPU with the native kernels, without gathering the KV blocks."""

from __future__ import annotations

import torch

from kernels.native.library import Native
from kernels.native.structures import KV_FORMATS, CAttention


def is_supported(query: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Return whether the native kernels support the dtypes and sizes of these tensors."""
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and k_cache.dtype in KV_FORMATS
        and query.shape[2] % 16 == 0
        and k_cache.is_contiguous()
        and not query.is_meta
    )


def paged_attention_native(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    kernels: Native,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `paged_attention` for CPU tensors that `is_supported` accepts."""
    num_heads, head_dim = query.shape[1:]
    wide = query.float().contiguous()
    out = torch.empty_like(wide)
    block_tables = block_tables.contiguous()
    kernels.attention(
        CAttention(
            query=wide.data_ptr(),
            query_stride=num_heads * head_dim,
            out=out.data_ptr(),
            out_stride=num_heads * head_dim,
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            cache_format=KV_FORMATS[k_cache.dtype],
            num_heads=num_heads,
            num_kv_heads=k_cache.shape[1],
            head_dim=head_dim,
            block_size=k_cache.shape[2],
            block_tables=block_tables.data_ptr(),
            table_stride=block_tables.shape[1],
            query_start=query_start.contiguous().data_ptr(),
            context_lens=context_lens.contiguous().data_ptr(),
            num_rows=len(context_lens),
            scale=scale,
            soft_cap=soft_cap or 0.0,
            sliding_window=sliding_window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
    )
    return out.to(query.dtype)
