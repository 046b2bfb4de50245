"""Attention for a flat batch over a paged KV cache (PagedAttention; Kwon et al., SOSP 2023).

A step has T tokens from R rows, concatenated: one token from each row in decode, and a chunk from each row in prefill.
`kernels.kv_cache` has already written the keys and values of these tokens, so that all visible keys are in the cache.

    query           [T, num_heads, head_dim]; any strides over tokens and heads
    k_cache,v_cache [num_blocks, num_kv_heads, block_size, head_dim]; contiguous
    block_tables    [R, max_blocks_per_row] int32; entries beyond the row's last block are not read
    query_start     [R + 1] int32; row r owns tokens query_start[r] .. query_start[r + 1]
    context_lens    [R] int32; tokens of the row including this chunk
    result          [T, num_heads, head_dim], dtype of query

Rules: query i of row r has position ``context_lens[r] - query_len[r] + i`` and sees the keys j with ``j <= position``
and, with a sliding window w, ``position - j < w``. Logits are ``scale * q · k``, and with a soft cap c then
``c * tanh(logit / c)`` (Gemma 2). Query head h reads KV head ``h // group_size``, with
``group_size = num_heads / num_kv_heads``. With *sinks* (GPT-OSS) the softmax of each head has one additional logit that
belongs to no key: it takes a share of the weights and adds nothing to the result. A row with context 0 (padding in a
captured graph) has result zero. A block may contain old keys from a failed row. Content beyond the row's context must
therefore not affect the result, even if it is NaN.

    cpu         CPU path without `kernels.native`: torch's attention over gathered blocks
    launch      CUDA path: choice of kernels and tiles
    tuning      the table of measured tiles
    schedule    splits the keys of rows in decode among programs, on the device
    decode      kernel for rows with one token
    prefill     kernels for rows with a chunk
    tiles       operations on a tile of keys that both kernels share

In a mixed batch both kernels run, and each skips the rows of the other. The decode kernel computes rows with one token.
"""

from __future__ import annotations

import torch

from kernels._dispatch import runs_on_triton
from kernels.native.attention import is_supported, paged_attention_native
from kernels.native.serving import native
from kernels.paged_attention.cpu import paged_attention_cpu
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
    sinks: torch.Tensor | None = None,
    num_leading_decodes: int = 0,
    schedule: DecodeSchedule | None = None,
) -> torch.Tensor:
    """Compute causal attention of every query over its row's keys (shapes and rules: see the package).

    ``max_query_len`` is the length of the longest chunk in the batch; 1 means that every row decodes. ``min_query_len``
    above 1 means that no row decodes. The first ``num_leading_decodes`` rows have at most one token, and the prefill
    kernel skips them. ``sliding_window`` is the number of visible positions, including the query's position. ``sinks``
    is ``[num_heads]`` float32, contiguous: the logit of each head's sink. ``schedule`` is the result of
    `schedule_decode` for this batch and window; if None, it is computed here.
    """
    if runs_on_triton(query):
        from kernels.paged_attention.launch import paged_attention_triton

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
            sinks,
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
            sinks=sinks,
        )
    return paged_attention_cpu(
        query, k_cache, v_cache, block_tables, query_start, context_lens, scale, sliding_window, soft_cap, sinks
    )
