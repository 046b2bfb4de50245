"""Definition of latent attention in plain torch; `latent_attention` documents shapes and rules."""

from __future__ import annotations

import torch

from kernels.kv_cache_reference import read_kv
from kernels.kv_quantised import head_size
from kernels.paged_attention_reference import visible_keys


def latent_attention_reference(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Plain torch form of `latent_attention`, row by row, and the CPU path without native kernels.

    Computes in float32, or in float64 for float64 queries.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    num_tokens, num_heads, _ = query.shape
    rank, block_size = head_size(latent_cache), latent_cache.shape[2]
    out = query.new_zeros(num_tokens, num_heads, rank)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if context == 0 or start == end:
            continue
        positions = torch.arange(context, device=query.device)
        slots = block_tables[row].long()[positions // block_size] * block_size + positions % block_size
        latents, rotaries = (read_kv(cache, slots, wide)[:, 0] for cache in (latent_cache, rotary_cache))
        scores = torch.einsum("qhd,kd->hqk", query[start:end].to(wide), torch.cat((latents, rotaries), -1)) * scale
        visible = visible_keys(positions[context - (end - start) :], positions, None)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,kd->qhd", weights, latents).to(query.dtype)
    return out
