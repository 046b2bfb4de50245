"""Triton kernel of `kernels.latent_attention`: one program per (tile of queries, tile of heads, part of the keys).

As in `kernels.paged_attention.prefill`, tiles are numbered through the flat batch. A program finds its row by binary
search. Rows in decode have tiles too. The latent tile is loaded once, and is the operand of both products.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl
from kernels.paged_attention.tiles import (
    accumulate,
    as_factor,
    dims_of,
    gather_scales,
    gather_tile,
    load_block_ids,
    score_factor,
    score_tile,
)


@kernel_with(varying=("query_start_ptr", "context_lens_ptr", "num_tokens", "num_rows", "table_stride"))
def latent_attention_kernel(
    query_ptr: tl.tensor,
    latent_cache_ptr: tl.tensor,
    rotary_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROTARY_TILE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Per program, compute BLOCK_M // HEADS_TILE consecutive queries of one row for HEADS_TILE heads.

    Row r owns the tiles from ``query_start[r] // QUERIES + r`` on. If the grid has a third axis, the programs along it
    divide the keys of a tile into equal parts. Each part's result then goes to ``partial`` ``[parts, T, num_heads,
    rank]`` float32, and the log2 of its sum of exponentials goes to ``lse`` ``[parts, T, num_heads]``. For a part
    without keys, ``lse`` is minus infinity.
    """
    QUERIES: tl.constexpr = BLOCK_M // HEADS_TILE  # noqa: N806
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a row see the most keys
    row, beyond = 0, num_rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            row = middle
        else:
            beyond = middle
    start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - start
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if first_query >= query_len:
        return
    context = tl.load(context_lens_ptr + row)

    lane = tl.arange(0, BLOCK_M)
    query_index = first_query + lane // HEADS_TILE
    head = tl.program_id(1) * HEADS_TILE + lane % HEADS_TILE
    in_tile = (head < NUM_HEADS) & (query_index < query_len)
    query_position = context - query_len + query_index
    KIND: tl.constexpr = latent_cache_ptr.dtype.element_ty  # noqa: N806
    PAIR: tl.constexpr = 2 if KIND == tl.uint16 or KIND == tl.uint8 else 1  # noqa: N806, SIM300
    APART: tl.constexpr = 16 if KIND == tl.uint8 else 1  # noqa: N806, SIM300
    dim = tl.arange(0, RANK_TILE // PAIR)
    rotary_dim = tl.arange(0, ROTARY_TILE // PAIR)
    own_dim = dims_of(dim, KIND)
    token = (start + query_index).to(tl.int64)
    query_row = query_ptr + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    query_mask = in_tile[:, None] & (dim < RANK // PAIR)[None, :]
    rotary_mask = in_tile[:, None] & (rotary_dim < ROTARY_DIM // PAIR)[None, :]
    place = query_row + own_dim[None, :]
    rotary_place = query_row + RANK + dims_of(rotary_dim, KIND)[None, :]
    query = as_factor(tl.load(place, mask=query_mask, other=0.0), KIND)
    rotary = as_factor(tl.load(rotary_place, mask=rotary_mask, other=0.0), KIND)
    query_odd, rotary_odd = query, rotary
    if PAIR == 2:
        query_odd = as_factor(tl.load(place + APART, mask=query_mask, other=0.0), KIND)
        rotary_odd = as_factor(tl.load(rotary_place + APART, mask=rotary_mask, other=0.0), KIND)

    high = tl.minimum(context - query_len + first_query + QUERIES, context)
    key_tiles = tl.cdiv(high, BLOCK_N)
    part_size = tl.cdiv(key_tiles, tl.num_programs(2))
    begin = tl.program_id(2) * part_size
    key_tiles = tl.minimum(begin + part_size, key_tiles)
    table_ptr = block_tables_ptr + tl.cast(row, tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, RANK_TILE // PAIR), tl.float32)
    acc_odd = acc
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    block = load_block_ids(table_ptr, begin * BLOCK_N + tl.arange(0, BLOCK_N), high, BLOCK_SIZE)
    for key_tile in range(begin, key_tiles):
        position = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = position < high
        latents = gather_tile(
            latent_cache_ptr, block, position, inside, 0, dim, 1, BLOCK_SIZE, RANK // PAIR, RANK_TILE // PAIR, True
        )
        scales = gather_scales(
            latent_cache_ptr, block, position, inside, 0, 1, BLOCK_SIZE, RANK // PAIR, RANK_TILE // PAIR
        )
        keys = gather_tile(
            rotary_cache_ptr,
            block,
            position,
            inside,
            0,
            rotary_dim,
            1,
            BLOCK_SIZE,
            ROTARY_DIM // PAIR,
            ROTARY_TILE // PAIR,
            True,
        )
        key_scales = gather_scales(
            rotary_cache_ptr, block, position, inside, 0, 1, BLOCK_SIZE, ROTARY_DIM // PAIR, ROTARY_TILE // PAIR
        )
        scores = score_tile(query, query_odd, latents, scales, scale, 0.0, False, NATIVE_FP8, INT8)
        scores += score_tile(rotary, rotary_odd, keys, key_scales, scale, 0.0, False, NATIVE_FP8, INT8)
        visible = (position[None, :] <= query_position[:, None]) & inside[None, :]
        scores = tl.where(visible, scores, -float("inf"))
        acc, acc_odd, row_max, row_sum = accumulate(
            scores,
            score_factor(scale, False),
            query,
            latents,
            scales,
            acc,
            acc_odd,
            row_max,
            row_sum,
            NATIVE_FP8,
            INT8,
        )
        block = load_block_ids(table_ptr, position + BLOCK_N, high, BLOCK_SIZE)

    divisor = tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    result = token * NUM_HEADS + head
    if tl.num_programs(2) > 1:
        result += tl.cast(tl.program_id(2), tl.int64) * num_tokens * NUM_HEADS
        lse = tl.where(context > 0, row_max + tl.log2(row_sum), 0.0)  # parts of a row without keys are zeros
        tl.store(lse_ptr + result, lse, mask=in_tile)
        partial_place = partial_ptr + result[:, None] * RANK + own_dim[None, :]
        tl.store(partial_place, acc / divisor, mask=query_mask)
        if PAIR == 2:
            tl.store(partial_place + APART, acc_odd / divisor, mask=query_mask)
    else:
        out_place = out_ptr + result[:, None] * RANK + own_dim[None, :]
        tl.store(out_place, (acc / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)
        if PAIR == 2:
            tl.store(out_place + APART, (acc_odd / divisor).to(out_ptr.dtype.element_ty), mask=query_mask)
