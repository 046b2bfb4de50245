"""Definition of paged attention in plain torch; the package `paged_attention` documents shapes and rules."""

from __future__ import annotations

import torch

from kernels.kv_quantised import from_cache


def paged_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch form of `paged_attention`: row by row, with the whole score matrix.

    Computes in float32, or in float64 for float64 queries.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    group_size = query.shape[1] // k_cache.shape[1]
    out = torch.zeros_like(query)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if context == 0:
            continue
        block_size, first_query = k_cache.shape[2], context - (end - start)
        # Blocks in front of the window may hold anything.
        first = 0 if sliding_window is None else max(0, first_query - sliding_window + 1) // block_size
        pages = block_tables[row, first : -(-context // block_size)].long()
        first_key = first * block_size
        # [context - first_key, num_kv_heads, head_dim]
        keys, values = (
            from_cache(cache[pages], wide).transpose(1, 2).flatten(0, 1)[: context - first_key].contiguous()
            for cache in (k_cache, v_cache)
        )
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(wide), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(first_key, context, device=query.device)
        visible = visible_keys(positions[first_query - first_key :], positions, sliding_window)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(-1, end - start, 1)), dim=-1)
        probs = scores.softmax(dim=-1)[..., : len(positions)]
        out[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)
    return out


def visible_keys(query_pos: torch.Tensor, key_pos: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Return the mask of visible keys, from positions ``[..., num_queries]`` and ``[..., num_keys]``."""
    distance = query_pos.unsqueeze(-1) - key_pos.unsqueeze(-2)
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    return visible
