"""Rotary position embedding (Su et al., 2021) in the half-rotation form of GPT-NeoX, Llama and Qwen.

Dimension ``i`` of a head pairs with dimension ``i + rotary_dim / 2``; the pair is rotated by the token's angle:

    out[i]        = x[i] · cos[i] - x[i + half] · sin[i]
    out[i + half] = x[i + half] · cos[i] + x[i] · sin[i]

Shapes: query ``[num_tokens, num_heads, head_dim]``, key ``[num_tokens, num_kv_heads, head_dim]``, cos and sin
``[num_tokens, rotary_dim / 2]`` float32, already gathered at each token's position (the worker owns the tables and
their scaling). With ``rotary_dim < head_dim`` the remaining dimensions pass through (partial rotary).

The products are formed in float32 and rounded once. `transformers` rounds cos and sin to the model's dtype first, so
in 16 bits it is further from the exact rotation and differs from ours in the last place; in float32 they agree.
"""

from __future__ import annotations

import torch


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by their tokens' angles; returns new tensors in their dtypes (shapes: see the module)."""
    return apply_rotary_reference(query, key, cos, sin)


def apply_rotary_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `apply_rotary`; also the CPU path."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
