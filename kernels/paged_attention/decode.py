"""Attention of the rows in decode: one program per (row, KV head, split of the keys).

The query heads that share a KV head are packed into one tile, so that a key is read once for all of them. A row's keys
are split over programs whose partial results meet in a second kernel (Flash-Decoding; Dao et al., 2023).

The number of splits is decided on the device: a captured graph must not depend on lengths, so its grid has room for
NUM_SPLITS splits of each row, and every program reckons from the lengths of the whole batch how many keys a split is to
have: as few as give the GPU enough programs, so that one long row among short ones gets many of them. Programs without
a share leave at once; a row with one split is written to the result right away.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel, tl
from kernels.paged_attention.tiles import accumulate, gather_tile, score_tile


@jit
def tiles_per_split(
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    wanted_programs: tl.tensor,
    sliding_window: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    WINDOWED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_TILE: tl.constexpr,
) -> tl.tuple:
    """The first tile of keys that a row sees, how many it sees, and how many each of its splits takes."""
    rows = tl.arange(0, ROWS_TILE)
    inside = rows < num_rows
    start = tl.load(query_start_ptr + rows, mask=inside, other=0)
    in_decode = inside & (tl.load(query_start_ptr + rows + 1, mask=inside, other=0) - start == 1)
    contexts = tl.load(context_lens_ptr + rows, mask=in_decode, other=0)
    firsts = contexts * 0
    if WINDOWED:
        firsts = tl.maximum(contexts - sliding_window, 0) // BLOCK_N
    tiles = tl.cdiv(contexts, BLOCK_N) - firsts
    own = rows == row
    first = tl.sum(tl.where(own, firsts, 0), 0)
    num_tiles = tl.sum(tl.where(own, tiles, 0), 0)
    fair = tl.cdiv(tl.sum(tiles, 0) * NUM_KV_HEADS, wanted_programs)
    share = tl.maximum(tl.maximum(fair, MIN_TILES), tl.cdiv(num_tiles, NUM_SPLITS))
    return first, num_tiles, share


@kernel
def decode_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    num_rows: tl.tensor,
    wanted_programs: tl.tensor,
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
    NATIVE_FP8: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: the query heads of one KV head of one row, over one split of its keys.

    A row with one split is written to ``out`` ``[T, num_heads, head_dim]``; of a row with more, ``partial`` ``[R,
    num_heads, NUM_SPLITS, head_dim]`` float32 gets each split's result and ``lse`` ``[R, num_heads, NUM_SPLITS]`` the
    log2 of its sum of exponentials.
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
    first, num_tiles, share = tiles_per_split(
        query_start_ptr,
        context_lens_ptr,
        row,
        num_rows,
        wanted_programs,
        sliding_window,
        NUM_KV_HEADS,
        WINDOWED,
        NUM_SPLITS,
        MIN_TILES,
        BLOCK_N,
        ROWS_TILE,
    )
    # A row without keys (padding of a graph) has one split of none, which writes its zeros.
    if (split > 0) & (split * share >= num_tiles):
        return
    begin = first + split * share
    end = tl.minimum(begin + share, first + num_tiles)

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
            NATIVE_FP8,
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
            NATIVE_FP8,
        )
        acc, row_max, row_sum = accumulate(scores, values.to(query.dtype), acc, row_max, row_sum)

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if num_tiles <= share:
        place = out_ptr + (token * NUM_KV_HEADS * GROUP_SIZE + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=query_mask)
    elif NUM_SPLITS > 1:
        partial_row = (row.to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head) * NUM_SPLITS + split
        tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=in_group)
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :], out, mask=query_mask)


@kernel
def combine_splits_kernel(
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    wanted_programs: tl.tensor,
    sliding_window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_TILE: tl.constexpr,
) -> None:
    """One program: one head of one row, its splits weighted by their share of the sum of exponentials; rows with one
    split have been written."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    if tl.load(query_start_ptr + row + 1) - token != 1:
        return
    _, num_tiles, share = tiles_per_split(
        query_start_ptr,
        context_lens_ptr,
        row,
        num_rows,
        wanted_programs,
        sliding_window,
        NUM_KV_HEADS,
        WINDOWED,
        NUM_SPLITS,
        MIN_TILES,
        BLOCK_N,
        ROWS_TILE,
    )
    if num_tiles <= share:
        return
    split = tl.arange(0, NUM_SPLITS)
    written = split < tl.cdiv(num_tiles, share)
    dim = tl.arange(0, DIM_TILE)
    first = (row.to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS
    lse = tl.load(lse_ptr + first + split, mask=written, other=-float("inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))  # every split has at least one key that is seen
    mask = written[:, None] & (dim < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (first + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.sum(weight, 0)
    place = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
