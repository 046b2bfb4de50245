"""Triton kernels of `kernels.qkv`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl
from kernels.gpu.kv_cache import store_heads


@kernel_with(varying=("slot_mapping_ptr",))
def rotate_and_cache_kernel(
    qkv_ptr: tl.tensor,
    query_norm_ptr: tl.tensor,
    key_norm_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    token_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Process HEADS heads of one token per program: queries, keys or values.

    For the rotation, every element also reads its partner, which is in the same cache line. Values are not rotated.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, TILE)[None, :]
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dim < HEAD_DIM)
    rotated = (dim < 2 * HALF) & (head < NUM_HEADS + NUM_KV_HEADS)
    partner = tl.where(dim < 2 * HALF, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)
    base = qkv_ptr + token * token_stride + head * HEAD_DIM
    own = tl.load(base + dim, mask=inside, other=0.0)
    other = tl.load(base + partner, mask=inside, other=0.0)
    x, y = own.to(tl.float32), other.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM + eps)
        x = _normed(x, scale, query_norm_ptr, key_norm_ptr, dim, is_query, is_value, own.dtype, HEAD_DIM)
        y = _normed(y, scale, query_norm_ptr, key_norm_ptr, partner, is_query, is_value, own.dtype, HEAD_DIM)
    angle = (dim % HALF) + head * 0
    cos = tl.load(cos_ptr + token * cos_stride + angle, mask=rotated, other=1.0)
    sin = tl.load(sin_ptr + token * sin_stride + angle, mask=rotated, other=0.0)
    out = (x * cos + y * tl.where(dim < HALF, -sin, sin)).to(own.dtype)

    place = query_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(place, out, mask=inside & is_query)
    slot = tl.load(slot_mapping_ptr + token)
    written = slot + head * 0 >= 0
    key_head = head - NUM_HEADS
    is_key = (key_head >= 0) & (key_head < NUM_KV_HEADS)
    store_heads(k_cache_ptr, out, slot, key_head, dim, written & is_key, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, NATIVE_FP8)
    value_head = key_head - NUM_KV_HEADS
    is_value = is_value & (value_head < NUM_KV_HEADS)
    store_heads(
        v_cache_ptr, out, slot, value_head, dim, written & is_value, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, NATIVE_FP8
    )


@jit
def _normed(
    x: tl.tensor,
    scale: tl.tensor,
    query_norm_ptr: tl.tensor,
    key_norm_ptr: tl.tensor,
    dim: tl.tensor,
    is_query: tl.tensor,
    is_value: tl.tensor,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Return the RMSNorm of queries and keys, rounded as in `kernels.norm`; return values unchanged."""
    inside = dim < HEAD_DIM
    of_query = tl.load(query_norm_ptr + dim, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm_ptr + dim, mask=inside, other=0.0).to(tl.float32)
    rounded = (x * scale).to(DTYPE).to(tl.float32)
    weighted = (rounded * tl.where(is_query, of_query, of_key)).to(DTYPE).to(tl.float32)
    return tl.where(is_value, x, weighted)
