"""Rotary position embedding (Su et al., 2021) in the half-rotation form of GPT-NeoX, Llama and Qwen.

Dimension ``i`` of a head pairs with dimension ``i + rotary_dim / 2``. The pair is rotated by the token's angle:

    out[i]        = x[i] · cos[i] - x[i + half] · sin[i]
    out[i + half] = x[i + half] · cos[i] + x[i] · sin[i]

Shapes: query ``[num_tokens, num_heads, head_dim]``, key ``[num_tokens, num_kv_heads, head_dim]``, cos and sin
``[num_tokens, rotary_dim / 2]`` float32, gathered at each token's position by the caller. With
``rotary_dim < head_dim`` the remaining dimensions are not changed (partial rotary).

The products are computed in float32 and rounded once. `transformers` rounds cos and sin to the model's dtype first. In
16 bits its results are thus less exact and differ in the last bit; in float32 they are equal.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import kernel, next_power_of_2, runs_on_triton, tl

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
    _rotary_kernel[(num_tokens, -(-(num_heads + num_kv_heads) // _HEADS))](
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


@kernel
def _rotary_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    query_out_ptr: tl.tensor,
    key_out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Rotate HEADS heads of one token per program, numbered through the query heads and then the key heads.

    Every element also reads its partner, from the same cache line. Partial rotary, and head dimensions that are not a
    power of two, thus need no separate path.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, TILE)[None, :]
    rotated = dim < 2 * HALF
    partner = tl.where(rotated, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)
    angle = dim % HALF
    cos = tl.load(cos_ptr + token * cos_stride + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + token * sin_stride + angle, mask=rotated, other=0.0)
    sin = tl.where(dim < HALF, -sin, sin)

    in_query = (head < NUM_HEADS) & (dim < HEAD_DIM)
    base = query_ptr + token * query_token_stride + head * query_head_stride
    x = tl.load(base + dim, mask=in_query, other=0.0).to(tl.float32)
    y = tl.load(base + partner, mask=in_query, other=0.0).to(tl.float32)
    out = (x * cos + y * sin).to(query_out_ptr.dtype.element_ty)
    tl.store(query_out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim, out, mask=in_query)

    head -= NUM_HEADS
    in_key = (head >= 0) & (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    base = key_ptr + token * key_token_stride + head * key_head_stride
    x = tl.load(base + dim, mask=in_key, other=0.0).to(tl.float32)
    y = tl.load(base + partner, mask=in_key, other=0.0).to(tl.float32)
    out = (x * cos + y * sin).to(key_out_ptr.dtype.element_ty)
    tl.store(key_out_ptr + (token * NUM_KV_HEADS + head) * HEAD_DIM + dim, out, mask=in_key)
