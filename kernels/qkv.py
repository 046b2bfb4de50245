"""Fused kernel between the QKV projection and attention: QK norm, rotary embedding and KV write.

Queries and keys are normalised (if the model has QK norm) and rotated by their token's angle. Keys and values are
written to their slots. Separate operations would make four passes over the projection. The fused kernel reads each head
once and writes it once, to the result or to the cache.

    qkv         [T, (num_heads + 2 · num_kv_heads) · head_dim]: all query heads, then all key heads, then all values
    query_norm, key_norm  [head_dim], or None for both: no norm (`kernels.norm`, weight_offset 0)
    cos, sin    [T, rotary_dim / 2] float32 (`kernels.rotary`)
    k_cache, v_cache, slot_mapping  (`kernels.kv_cache`)
    result      the queries, [T, num_heads, head_dim]

The result equals that of `norm`, `rotary` and `kv_cache` in sequence, with the same rounding between them.
"""

from __future__ import annotations

import torch

from kernels._dispatch import next_power_of_2, runs_on_triton
from kernels.fp8 import native_fp8
from kernels.kv_cache import write_kv
from kernels.kv_quantised import head_size
from kernels.norm import rms_norm
from kernels.rotary import apply_rotary

_HEADS = 4  # heads per program


def rotate_and_cache(
    qkv: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate a packed projection and write its KV; return queries ``[T, num_heads, head_dim]``."""
    num_kv_heads, block_size = k_cache.shape[1:3]
    head_dim = head_size(k_cache)
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if not runs_on_triton(qkv):
        return _unfused(qkv, num_heads, query_norm, key_norm, eps, cos, sin, k_cache, v_cache, slot_mapping)
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    from kernels.gpu.qkv import rotate_and_cache_kernel

    rotate_and_cache_kernel[(num_tokens, -(-(num_heads + 2 * num_kv_heads) // _HEADS))](
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        slot_mapping,
        query,
        k_cache,
        v_cache,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        NORMED=query_norm is not None,
        NATIVE_FP8=native_fp8(qkv),
        HEADS=_HEADS,
        TILE=next_power_of_2(head_dim),
    )
    return query


def _unfused(
    qkv: torch.Tensor,
    num_heads: int,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Compute `rotate_and_cache` with separate operations, which is the CPU path."""
    num_kv_heads, head_dim = k_cache.shape[1], head_size(k_cache)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, eps), rms_norm(key, key_norm, eps)
    query, key = apply_rotary(query, key, cos, sin)
    write_kv(key, value, k_cache, v_cache, slot_mapping)
    return query
