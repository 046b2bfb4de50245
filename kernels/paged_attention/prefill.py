"""Attention for the rows in prefill: one program per (tile of queries, KV head).

All query heads of a KV head are packed into one tile, so that each key is read only once. The softmax is computed
online over the keys (FlashAttention-2; Dao, 2023). Tiles are numbered through the flat batch, so that the grid depends
only on T and R. A program finds its row by binary search. If there are too few programs to fill the GPU (for example,
for a short chunk of a long prompt), several programs divide a tile's keys, and another kernel combines their results.
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


@kernel_with(varying=("query_start_ptr", "context_lens_ptr", "first_row", "num_tokens", "num_rows", "table_stride"))
def prefill_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    first_row: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
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
    SINKS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Per program, compute BLOCK_M // GROUP_SIZE consecutive queries of one row for all query heads of one KV head.

    Row r owns the tiles from ``query_start[r] // QUERIES + r`` on. If a row owns more tiles than it needs, the programs
    of unused tiles return at once. The rows before ``first_row`` have at most one token each and no tiles.

    If the grid has a third axis, the programs along it divide a tile's keys into equal parts. Each part's result then
    goes to ``partial`` ``[parts, T, num_heads, head_dim]`` float32, and the log2 of its sum of exponentials goes to
    ``lse`` ``[parts, T, num_heads]``. For a part without keys, ``lse`` is minus infinity.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP_SIZE  # noqa: N806
    # Start a row's last tiles first, because they see the most keys and would otherwise run alone at the end.
    first_tile = tl.load(query_start_ptr + first_row) // QUERIES + first_row
    tile = first_tile + tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row, beyond = first_row, num_rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            row = middle
        else:
            beyond = middle
    start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - start
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if (query_len <= 1) | (first_query >= query_len):
        return
    context = tl.load(context_lens_ptr + row)

    lane = tl.arange(0, BLOCK_M)
    query_index = first_query + lane // GROUP_SIZE
    head = kv_head * GROUP_SIZE + lane % GROUP_SIZE
    in_tile = (lane < QUERIES * GROUP_SIZE) & (query_index < query_len)
    query_position = context - query_len + query_index
    KIND: tl.constexpr = k_cache_ptr.dtype.element_ty  # noqa: N806
    PAIR: tl.constexpr = 2 if KIND == tl.uint16 or KIND == tl.uint8 else 1  # noqa: N806, SIM300
    APART: tl.constexpr = 16 if KIND == tl.uint8 else 1  # noqa: N806, SIM300
    dim = tl.arange(0, DIM_TILE // PAIR)
    own_dim = dims_of(dim, KIND)
    query_mask = in_tile[:, None] & (dim < HEAD_DIM // PAIR)[None, :]
    token = (start + query_index).to(tl.int64)
    query_place = query_ptr + token[:, None] * query_token_stride + head[:, None] * query_head_stride + own_dim[None, :]
    query = as_factor(tl.load(query_place, mask=query_mask, other=0.0), KIND)
    query_odd = query
    if PAIR == 2:
        query_odd = as_factor(tl.load(query_place + APART, mask=query_mask, other=0.0), KIND)

    # All queries of the tile see the keys before the first query, except at the end of a window. Only other keys need a
    # mask.
    first_position = context - query_len + first_query
    high = tl.minimum(first_position + QUERIES, context)
    begin = 0
    seen_by_all = (first_position + 1) // BLOCK_N
    if WINDOWED:
        begin = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N
        seen_by_all = begin

    key_tiles = tl.cdiv(high, BLOCK_N)
    part_size = tl.cdiv(key_tiles - begin, tl.num_programs(2))
    begin += tl.program_id(2) * part_size
    key_tiles = tl.minimum(begin + part_size, key_tiles)
    seen_by_all = tl.maximum(begin, tl.minimum(seen_by_all, key_tiles))

    table_ptr = block_tables_ptr + tl.cast(row, tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, DIM_TILE // PAIR), tl.float32)
    acc_odd = acc
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        row_max, row_sum = begin_with_sink(sinks_ptr, head, in_tile, tl.program_id(2) == 0, query)
    block = load_block_ids(table_ptr, begin * BLOCK_N + tl.arange(0, BLOCK_N), high, BLOCK_SIZE)
    for key_tile in range(begin, seen_by_all):
        acc, acc_odd, row_max, row_sum, block = _attend_tile(
            query,
            query_odd,
            k_cache_ptr,
            v_cache_ptr,
            table_ptr,
            block,
            key_tile * BLOCK_N + tl.arange(0, BLOCK_N),
            high,
            query_position,
            kv_head,
            dim,
            acc,
            acc_odd,
            row_max,
            row_sum,
            scale,
            sliding_window,
            soft_cap,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM // PAIR,
            DIM_TILE // PAIR,
            False,
            WINDOWED,
            CAPPED,
            NATIVE_FP8,
            INT8,
        )
    for key_tile in range(seen_by_all, key_tiles):
        acc, acc_odd, row_max, row_sum, block = _attend_tile(
            query,
            query_odd,
            k_cache_ptr,
            v_cache_ptr,
            table_ptr,
            block,
            key_tile * BLOCK_N + tl.arange(0, BLOCK_N),
            high,
            query_position,
            kv_head,
            dim,
            acc,
            acc_odd,
            row_max,
            row_sum,
            scale,
            sliding_window,
            soft_cap,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            HEAD_DIM // PAIR,
            DIM_TILE // PAIR,
            True,
            WINDOWED,
            CAPPED,
            NATIVE_FP8,
            INT8,
        )

    divisor = tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    place = token * (NUM_KV_HEADS * GROUP_SIZE) + head
    if tl.num_programs(2) > 1:
        place += tl.cast(tl.program_id(2), tl.int64) * num_tokens * (NUM_KV_HEADS * GROUP_SIZE)
        tl.store(lse_ptr + place, row_max + tl.log2(row_sum), mask=in_tile)
        partial_place = partial_ptr + place[:, None] * HEAD_DIM + own_dim[None, :]
        tl.store(partial_place, acc / divisor, mask=query_mask)
        if PAIR == 2:
            tl.store(partial_place + APART, acc_odd / divisor, mask=query_mask)
    else:
        out_place = out_ptr + place[:, None] * HEAD_DIM + own_dim[None, :]
        tl.store(out_place, (acc / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)
        if PAIR == 2:
            tl.store(out_place + APART, (acc_odd / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)


@kernel_with(varying=("num_tokens", "num_parts"))
def combine_parts_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_parts: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PARTS_TILE: tl.constexpr,
) -> None:
    """Per program, combine the parts for one head of one token, weighted by their sums of exponentials.

    Tokens of decode rows get arbitrary values, because their rows are computed later.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS_TILE)
    dim = tl.arange(0, DIM_TILE)
    place = (part.to(tl.int64) * num_tokens + token) * NUM_HEADS + head
    lse = tl.load(lse_ptr + place, mask=part < num_parts, other=-float("inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    mask = (weight > 0)[:, None] & (dim < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    to = out_ptr + (tl.cast(token, tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@jit
def _attend_tile(
    query: tl.tensor,
    query_odd: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    table_ptr: tl.tensor,
    block: tl.tensor,
    position: tl.tensor,
    high: tl.tensor,
    query_position: tl.tensor,
    kv_head: tl.tensor,
    dim: tl.tensor,
    acc: tl.tensor,
    acc_odd: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    scale: tl.tensor,
    sliding_window: tl.tensor,
    soft_cap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
) -> tl.tuple:
    """Update the online softmax with one tile of keys. MASKED means that some queries do not see all keys."""
    inside = position < high
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
        MASKED,
    )
    key_scales = gather_scales(
        k_cache_ptr, block, position, inside, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIM_TILE
    )
    scores = score_tile(query, query_odd, keys, key_scales, scale, soft_cap, CAPPED, NATIVE_FP8, INT8)
    if MASKED:
        distance = query_position[:, None] - position[None, :]
        visible = distance >= 0
        if WINDOWED:
            visible = visible & (distance < sliding_window)
        scores = tl.where(visible, scores, -float("inf"))
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
        MASKED,
    )
    value_scales = gather_scales(
        v_cache_ptr, block, position, inside, kv_head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, DIM_TILE
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
    block = load_block_ids(table_ptr, position + position.shape[0], high, BLOCK_SIZE)
    return acc, acc_odd, row_max, row_sum, block
