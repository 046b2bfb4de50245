"""Rotary position embedding (Su et al., 2021) in the half-rotation form of GPT-NeoX, Llama and Qwen.

Dimension ``i`` of a head pairs with dimension ``i + rotary_dim / 2``. The pair is rotated by the token's angle:

    out[i]        = x[i] · cos[i] - x[i + half] · sin[i]
    out[i + half] = x[i + half] · cos[i] + x[i] · sin[i]

Shapes: query ``[num_tokens, num_heads, head_dim]``, key ``[num_tokens, num_kv_heads, head_dim]``, cos and sin
``[num_tokens, rotary_dim / 2]`` float32, gathered at each token's position by the caller. With
``rotary_dim < head_dim`` the remaining dimensions are not changed (partial rotary).

The products are computed in float32 and rounded once. `transformers` first rounds cos and sin to the model's dtype. In
16-bit dtypes its results are therefore less accurate and differ in the last bit; in float32 they are equal.
"""

from __future__ import annotations

import torch

from kernels._dispatch import next_power_of_2, runs_on_triton

_HEADS = 8  # heads per program


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key by their tokens' angles; return new tensors in their dtypes (shapes: see the module)."""
    if not runs_on_triton(query):
        return apply_rotary_reference(query, key, cos, sin)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    from kernels.gpu.rotary import rotary_kernel

    rotary_kernel[(num_tokens, -(-(num_heads + num_kv_heads) // _HEADS))](
        query,
        key,
        query_out,
        key_out,
        cos,
        sin,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        HEADS=_HEADS,
        TILE=next_power_of_2(head_dim),
    )
    return query_out, key_out


def apply_rotary_reference(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `apply_rotary`, which is also the CPU path."""
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
