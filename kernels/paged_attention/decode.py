"""Attention of the rows in decode: one program per (row, KV head, split of the keys).

The query heads that share a KV head are packed into one tile, so that a key is read once for all of them. The
number of splits is fixed at launch, for a captured graph must not depend on lengths; each program finds its share
of the row's keys from context_lens on the device, and those without a share leave at once. The splits' partial
results meet in a second kernel (Flash-Decoding; Dao et al., 2023).
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, tl
from kernels.paged_attention.tiles import accumulate, gather_tile, score_tile


@kernel
def decode_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    sliding_window: tl.tensor,
    soft_cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one row, over one split of its keys.

    With one split ``partial`` is the result itself ``[T, num_heads, head_dim]``; else it is ``[R, num_heads,
    NUM_SPLITS, head_dim]`` float32, and ``lse`` ``[R, num_heads, NUM_SPLITS]`` holds the log2 of each split's
    sum of exponentials, -inf where a split had no keys (its partial is then left unwritten).
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    if tl.load(query_start_ptr + row + 1) - token != 1:
        return
    context = tl.load(context_lens_ptr + row)
    low = 0
    if WINDOWED:
        low = tl.maximum(context - sliding_window, 0)
    first = low // BLOCK_N
    num_tiles = tl.cdiv(context, BLOCK_N) - first
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    begin = first + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, first + num_tiles)

    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + lane
    in_group = lane < GROUP_SIZE
    if NUM_SPLITS > 1:
        lse_place = lse_ptr + (row * NUM_KV_HEADS * GROUP_SIZE + head) * NUM_SPLITS + split
        if begin >= end:
            tl.store(lse_place, tl.full((BLOCK_M,), -float("inf"), tl.float32), mask=in_group)
            return

    dim = tl.arange(0, DIM_TILE)
    query_mask = in_group[:, None] & (dim < HEAD_DIM)[None, :]
    query_place = query_ptr + token * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    query = tl.load(query_place, mask=query_mask, other=0.0)
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, DIM_TILE), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(begin, end):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (position >= low) & (position < context)
        keys = gather_tile(
            k_cache_ptr,
            table_ptr,
            position,
            inside,
            kv_head,
            dim,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_TILE,
        )
        scores = score_tile(query, keys, scale, soft_cap, CAPPED)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        values = gather_tile(
            v_cache_ptr,
            table_ptr,
            position,
            inside,
            kv_head,
            dim,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_TILE,
        )
        acc, row_max, row_sum = accumulate(scores, values.to(query.dtype), acc, row_max, row_sum)

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if NUM_SPLITS > 1:
        partial_row = (row.to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head) * NUM_SPLITS + split
        tl.store(lse_place, row_max + tl.log2(row_sum), mask=in_group)
    else:
        partial_row = token * NUM_KV_HEADS * GROUP_SIZE + head
    place = partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, out.to(partial_ptr.dtype.element_ty), mask=query_mask)


@kernel
def combine_splits_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> None:
    """One program: one head of one row, its splits weighted by their share of the sum of exponentials."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    if tl.load(query_start_ptr + row + 1) - token != 1:
        return
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, DIM_TILE)
    first = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS
    lse = tl.load(lse_ptr + first + split)
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top))
    written = lse > -float("inf")
    mask = written[:, None] & (dim < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (first + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    place = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
