"""Attention of the rows in decode: one program per KV head and share of a row's keys.

The query heads of a KV head are packed into one tile, so that a key is read once for all of them. The schedule assigns
a share of a row's keys to each program (`kernels.paged_attention.schedule`). A row with one share is written to the
result directly; a second kernel combines the partial results of other rows (Flash-Decoding; Dao et al., 2023).
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl
from kernels.paged_attention.tiles import accumulate, gather_tile, load_block_ids, score_factor, score_tile


@kernel_with(varying=("query_start_ptr", "table_stride"))
def decode_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute per program the query heads of one KV head of one row, over one share of its keys.

    A row with one share is written to ``out`` ``[T, num_heads, head_dim]``. For a row with more shares, each share's
    result goes to ``partial`` ``[num_shares, num_heads, head_dim]`` float32, and the log2 of its sum of exponentials to
    ``lse`` ``[num_shares, num_heads]``.
    """
    kv_head = tl.program_id(0)  # neighbours read the same blocks
    share = tl.program_id(1)
    row = tl.load(shares_ptr + share * FIELDS)
    if row < 0:
        return
    begin = tl.load(shares_ptr + share * FIELDS + 1)
    end = tl.load(shares_ptr + share * FIELDS + 2)
    num_shares = tl.load(shares_ptr + share * FIELDS + 3)
    token = tl.load(query_start_ptr + row).to(tl.int64)

    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + lane
    in_group = lane < GROUP_SIZE
    dim = tl.arange(0, DIM_TILE)
    query_mask = in_group[:, None] & (dim < HEAD_DIM)[None, :]
    query_place = query_ptr + token * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    query = tl.load(query_place, mask=query_mask, other=0.0)
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, DIM_TILE), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    block = load_block_ids(table_ptr, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < end
        keys = gather_tile(
            k_cache_ptr,
            block,
            position,
            inside,
            kv_head,
            dim,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_TILE,
            True,
            NATIVE_FP8,
        )
        scores = score_tile(query, keys, scale, soft_cap, CAPPED)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        values = gather_tile(
            v_cache_ptr,
            block,
            position,
            inside,
            kv_head,
            dim,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM_TILE,
            True,
            NATIVE_FP8,
        )
        acc, row_max, row_sum = accumulate(
            scores, score_factor(scale, CAPPED), values.to(query.dtype), acc, row_max, row_sum
        )
        block = load_block_ids(table_ptr, position + BLOCK_N, end, BLOCK_SIZE)

    # A row without keys (padding of a graph) has one empty share, which writes zeros.
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if num_shares == 1:
        place = out_ptr + (token * NUM_KV_HEADS * GROUP_SIZE + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=query_mask)
    else:
        partial_row = share.to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head
        tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=in_group)
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :], out, mask=query_mask)


@kernel_with(varying=("query_start_ptr",))
def combine_shares_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SHARES_TILE: tl.constexpr,
) -> None:
    """Combine the shares of one head of one row per program, weighted by their sums of exponentials.

    Rows with one share are skipped.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_shares = tl.load(rows_ptr + row * 2 + 1)
    if num_shares <= 1:
        return
    first_share = tl.load(rows_ptr + row * 2)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    dim = tl.arange(0, DIM_TILE)
    acc = tl.zeros((DIM_TILE,), tl.float32)
    largest = tl.cast(-float("inf"), tl.float32)
    total = tl.cast(0.0, tl.float32)
    for first in range(0, num_shares, SHARES_TILE):
        share = first + tl.arange(0, SHARES_TILE)
        there = share < num_shares
        place = (first_share + share).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(lse_ptr + place, mask=there, other=-float("inf"))
        mask = there[:, None] & (dim < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))  # every share has at least one key
        weight = tl.exp2(lse - new_largest)
        shrink = tl.exp2(largest - new_largest)
        acc = acc * shrink + tl.sum(partial * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = new_largest
    place = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(place, (acc / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
