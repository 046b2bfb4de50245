"""Triton kernels of `kernels.rotary`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, tl


@kernel
def rotary_kernel(
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
    """Rotate HEADS heads of one token per program; query heads are numbered first, then key heads.

    Every element also reads its partner, which is in the same cache line. Partial rotary embeddings, and head
    dimensions that are not a power of two, therefore need no separate code path.
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
