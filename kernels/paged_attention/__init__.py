"""Attention of a flat batch of rows over a paged KV cache (PagedAttention; Kwon et al., SOSP 2023).

A step runs T tokens of R rows concatenated: rows in decode bring one token, rows in prefill a chunk of their
prompt. `kernels.kv_cache` has already written the chunk's own keys and values, so every key a query may see
is in the cache.

    query           [T, num_heads, head_dim]; any strides over tokens and heads
    k_cache,v_cache [num_blocks, num_kv_heads, block_size, head_dim]; contiguous
    block_tables    [R, max_blocks_per_row] int32; entries beyond the row's last page are never followed
    query_start     [R + 1] int32; row r owns tokens query_start[r] .. query_start[r + 1]
    context_lens    [R] int32; tokens of the row including this chunk
    result          [T, num_heads, head_dim], dtype of query

Rules: query i of row r sits at position ``context_lens[r] - query_len[r] + i`` and sees the keys j with
``j <= position`` and, under a sliding window of w, ``position - j < w``. Logits are ``scale * q · k``, under
a soft cap c then ``c * tanh(logit / c)`` (Gemma 2). Query head h reads KV head ``h // group_size``, with
``group_size = num_heads / num_kv_heads``. A row with context 0 (padding of a captured graph) gets zeros. What
lies in a page beyond the row's context never reaches the result, not even as NaN: a page may have held the
keys of a row that failed.

    cpu         the path for CPU tensors where `kernels.native` does not serve: torch's attention over gathered pages
    launch      the path for CUDA tensors: which kernels, with which tiles
    tuning      the table of tiles, as measured
    schedule    how the keys of rows in decode are shared among programs, reckoned on the device
    decode      kernels for rows that bring one token
    prefill     kernel for rows that bring a chunk
    tiles       what both kernels do with a tile of keys

In a mixed batch both kernels run, and each leaves the other's rows alone. A row belongs to decode when it
brings one token.
"""

from __future__ import annotations

import torch

from kernels._triton import runs_on_triton
from kernels.native.attention import is_supported, paged_attention_native
from kernels.native.serving import native
from kernels.paged_attention.cpu import paged_attention_cpu
from kernels.paged_attention.launch import paged_attention_triton
from kernels.paged_attention.schedule import DecodeSchedule, schedule_decode
from kernels.paged_attention_reference import paged_attention_reference

__all__ = ["DecodeSchedule", "paged_attention", "paged_attention_reference", "schedule_decode"]


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    min_query_len: int = 1,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_leading_decodes: int = 0,
    schedule: DecodeSchedule | None = None,
) -> torch.Tensor:
    """Causal attention of every query over its row's pages (shapes and rules: see the package).

    ``max_query_len`` is the longest chunk in the batch, known to the host: 1 means that every row is in
    decode; ``min_query_len`` above 1 means that none is; the first ``num_leading_decodes`` rows are known to be, and
    spare the others' kernel looking for them. ``sliding_window`` counts the visible positions including the
    query's own. ``schedule`` is what `schedule_decode` gave for this batch and window; None: it is made here.
    """
    if runs_on_triton(query):
        return paged_attention_triton(
            query,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            min_query_len,
            max_query_len,
            scale,
            sliding_window,
            soft_cap,
            num_leading_decodes,
            schedule,
        )
    kernels = native()
    if kernels is not None and is_supported(query, k_cache):
        return paged_attention_native(
            query,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            kernels=kernels,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    return paged_attention_cpu(
        query, k_cache, v_cache, block_tables, query_start, context_lens, scale, sliding_window, soft_cap
    )
