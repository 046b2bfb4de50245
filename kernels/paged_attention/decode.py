"""Attention for the rows in decode: each program computes consecutive shares of the keys, for one KV head.

All query heads of a KV head are packed into one tile, so that each key is read only once. The schedule gives all
programs the same number of keys (`kernels.paged_attention.schedule`). The result of a row with one share is written
directly. If a row has several shares, the program that finishes the last share combines them (Flash-Decoding; Dao et
al., 2023; Stream-K; Osama et al., 2023).
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl
from kernels.paged_attention.tiles import (
    accumulate,
    as_factor,
    begin_with_sink,
    dims_of,
    gather_scales,
    gather_tile,
    load_block_ids,
    score_factor,
    score_tile,
)


@kernel_with(varying=("table_stride",))
def decode_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    programs_ptr: tl.tensor,
    finished_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
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
    SINKS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    SHARES_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Compute, in each program, the query heads of one KV head over the shares that the schedule assigns.

    A row with one share is written to ``out`` ``[T, num_heads, head_dim]``. For a row with more shares, each share's
    result goes to ``partial`` ``[num_shares, num_heads, head_dim]`` float32, and the log2 of the share's sum of
    exponentials goes to ``lse`` ``[num_shares, num_heads]``. ``finished`` ``[R, num_kv_heads]`` counts each row's
    finished shares; it is zero before and after the launch.
    """
    kv_head = tl.program_id(0)  # neighbouring programs read the same blocks
    program = tl.program_id(1)
    first_share = tl.load(programs_ptr + program)
    beyond = tl.load(programs_ptr + program + 1)

    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + lane
    in_group = lane < GROUP_SIZE
    KIND: tl.constexpr = k_cache_ptr.dtype.element_ty  # noqa: N806
    PAIR: tl.constexpr = 2 if KIND == tl.uint16 or KIND == tl.uint8 else 1  # noqa: N806, SIM300
    APART: tl.constexpr = 16 if KIND == tl.uint8 else 1  # noqa: N806, SIM300
    dim = tl.arange(0, DIM_TILE // PAIR)
    own_dim = dims_of(dim, KIND)
    query_mask = in_group[:, None] & (dim < HEAD_DIM // PAIR)[None, :]
    for share in range(first_share, beyond):
        record = shares_ptr + share * FIELDS
        row = tl.load(record)
        begin = tl.load(record + 1)
        end = tl.load(record + 2)
        first_of_row = tl.load(record + 3)
        num_shares = tl.load(record + 4)
        token = tl.load(record + 5).to(tl.int64)

        query_place = query_ptr + token * query_token_stride + head[:, None] * query_head_stride + own_dim[None, :]
        query = as_factor(tl.load(query_place, mask=query_mask, other=0.0), KIND)
        query_odd = query
        if PAIR == 2:
            query_odd = as_factor(tl.load(query_place + APART, mask=query_mask, other=0.0), KIND)
        table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
        acc = tl.zeros((BLOCK_M, DIM_TILE // PAIR), tl.float32)
        acc_odd = acc
        row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
        if SINKS:
            row_max, row_sum = begin_with_sink(sinks_ptr, head, in_group, share == first_of_row, query)
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
                HEAD_DIM // PAIR,
                DIM_TILE // PAIR,
                True,
            )
            key_scales = gather_scales(
                k_cache_ptr,
                block,
                position,
                inside,
                kv_head,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM // PAIR,
                DIM_TILE // PAIR,
            )
            scores = score_tile(query, query_odd, keys, key_scales, scale, soft_cap, CAPPED, NATIVE_FP8, INT8)
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
                HEAD_DIM // PAIR,
                DIM_TILE // PAIR,
                True,
            )
            value_scales = gather_scales(
                v_cache_ptr,
                block,
                position,
                inside,
                kv_head,
                NUM_KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM // PAIR,
                DIM_TILE // PAIR,
            )
            acc, acc_odd, row_max, row_sum = accumulate(
                scores,
                score_factor(scale, CAPPED),
                query,
                values,
                value_scales,
                acc,
                acc_odd,
                row_max,
                row_sum,
                NATIVE_FP8,
                INT8,
            )
            block = load_block_ids(table_ptr, position + BLOCK_N, end, BLOCK_SIZE)

        # A row without keys (graph padding) has one empty share, for which the program writes zeros.
        divisor = tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        if num_shares == 1:
            place = out_ptr + (token * NUM_KV_HEADS * GROUP_SIZE + head)[:, None] * HEAD_DIM + own_dim[None, :]
            tl.store(place, (acc / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)
            if PAIR == 2:
                tl.store(place + APART, (acc_odd / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)
        else:
            partial_row = tl.cast(share, tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head
            tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=in_group)
            partial_place = partial_ptr + partial_row[:, None] * HEAD_DIM + own_dim[None, :]
            tl.store(partial_place, acc / divisor, mask=query_mask)
            if PAIR == 2:
                tl.store(partial_place + APART, acc_odd / divisor, mask=query_mask)
            tl.debug_barrier()  # all threads must finish writing before one of them increments the counter
            counter = finished_ptr + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_shares - 1:
                tl.store(counter, 0)
                _combine_shares(
                    partial_ptr,
                    lse_ptr,
                    out_ptr,
                    token,
                    kv_head,
                    first_of_row,
                    num_shares,
                    NUM_KV_HEADS,
                    GROUP_SIZE,
                    GROUP_TILE,
                    HEAD_DIM,
                    DIM_TILE,
                    SHARES_TILE,
                )


@jit
def _combine_shares(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    kv_head: tl.tensor,
    first_share: tl.tensor,
    num_shares: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    SHARES_TILE: tl.constexpr,
) -> None:
    """Combine one row's shares for the heads of one KV head, weighted by their sums of exponentials.

    Other multiprocessors wrote these shares, so the loads bypass the L1 cache.
    """
    lane = tl.arange(0, GROUP_TILE)
    head = kv_head * GROUP_SIZE + lane
    in_group = lane < GROUP_SIZE
    dim = tl.arange(0, DIM_TILE)
    mask = in_group[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros((GROUP_TILE, DIM_TILE), tl.float32)
    largest = tl.full((GROUP_TILE,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_TILE,), tl.float32)
    for first in range(0, num_shares, SHARES_TILE):
        share = first + tl.arange(0, SHARES_TILE)
        there = share < num_shares
        place = (first_share + share).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP_SIZE) + head[None, :]
        known = there[:, None] & in_group[None, :]
        lse = tl.load(lse_ptr + place, mask=known, other=-float("inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_ptr + place[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=there[:, None, None] & mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.where(in_group, tl.maximum(largest, tl.max(lse, 0)), 0.0)  # every share has a key
        weight = tl.exp2(lse - new_largest[None, :])
        shrink = tl.exp2(largest - new_largest)
        acc = acc * shrink[:, None] + tl.sum(partial * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = new_largest
    out = acc / tl.where(in_group, total, 1.0)[:, None]
    place = out_ptr + (token * NUM_KV_HEADS * GROUP_SIZE + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)
