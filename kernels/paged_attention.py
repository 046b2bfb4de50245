"""Attention of a flat batch of rows over a paged KV cache (PagedAttention; Kwon et al., SOSP 2023).

A step runs T tokens of R rows concatenated: rows in decode bring one token, rows in prefill a chunk of their
prompt. `kernels.kv_cache` has already written the chunk's own keys and values, so every key a query may see
is in the cache.

    query           [T, num_heads, head_dim]; any strides over tokens and heads
    k_cache,v_cache [num_blocks, num_kv_heads, block_size, head_dim]; contiguous
    block_tables    [R, max_blocks_per_row] int32; entries beyond the row's last page are never followed
    query_start     [R + 1] int32; row r owns tokens query_start[r] .. query_start[r + 1]
    context_lens    [R] int32; tokens of the row including this chunk
    result          [T, num_heads, head_dim], dtype of query

Rules: query i of row r sits at position ``context_lens[r] - query_len[r] + i`` and sees the keys j with
``j <= position`` and, under a sliding window of w, ``position - j < w``. Logits are ``scale * q · k``, under
a soft cap c then ``c * tanh(logit / c)`` (Gemma 2). Query head h reads KV head ``h // group_size``, with
``group_size = num_heads / num_kv_heads``. A row with context 0 (padding of a captured graph) gets zeros. What
lies in a page beyond the row's context never reaches the result, not even as NaN: a page may have held the
keys of a row that failed.

The CPU path gathers pages and calls torch's fused SDPA: rows in decode together, padded to the longest of a
group of similar length; rows in prefill one by one, in tiles of queries.

On CUDA the query heads that share a KV head are packed into one tile, so that a key is read once for all of
them.

* Decode: one program per (row, KV head, split). The number of splits is fixed at launch, for a captured graph
  must not depend on lengths; each program finds its share of the row's keys from context_lens on the device,
  and those without a share leave at once. The splits' partial results meet in a second kernel
  (Flash-Decoding; Dao et al., 2023).
* Prefill: one program per (tile of queries, KV head), online softmax over the keys (FlashAttention-2; Dao,
  2023). Tiles are numbered through the flat batch, so that the grid follows from T and R alone; a program
  finds its row by bisection.

In a mixed batch both run, and each leaves the other's rows alone. A row belongs to decode when it brings one
token.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from dataclasses import dataclass
from operator import sub

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels._triton import jit, kernel, next_power_of_2, runs_on_triton, tl

_PREFILL_TILE = 256  # queries per SDPA call on CPU: bounds the mask and skips the keys above the diagonal
_DECODE_PADDING = 128  # keys: padding a row this far costs less than another call
_DECODE_ELEMENTS = 1 << 20  # keys gathered at once: K and V stay in the core's cache until they are used


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every query over its row's pages (shapes and rules: see the module).

    ``max_query_len`` is the longest chunk in the batch, known to the host: 1 means that every row is in
    decode. ``sliding_window`` counts the visible positions including the query's own.
    """
    if runs_on_triton(query):
        return _paged_attention_triton(
            query,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            max_query_len,
            scale,
            sliding_window,
            soft_cap,
        )
    return _paged_attention_cpu(
        query, k_cache, v_cache, block_tables, query_start, context_lens, scale, sliding_window, soft_cap
    )


def paged_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Plain torch form of `paged_attention`: one row at a time, the whole score matrix, in float32 or query's
    float64."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group_size = query.shape[1] // k_cache.shape[1]
    out = torch.zeros_like(query)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if context == 0:
            continue
        pages = block_tables[row, : -(-context // k_cache.shape[2])].long()
        keys = k_cache[pages].transpose(1, 2).flatten(0, 1)[:context].to(wide)  # [context, num_kv_heads, head_dim]
        values = v_cache[pages].transpose(1, 2).flatten(0, 1)[:context].to(wide)
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start:end].to(wide), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(context, device=query.device)
        visible = _visible(positions[context - (end - start) :], positions, sliding_window)
        probs = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)
    return out


def _visible(query_pos: torch.Tensor, key_pos: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which keys each query sees, from positions ``[..., num_queries]`` and ``[..., num_keys]``."""
    distance = query_pos.unsqueeze(-1) - key_pos.unsqueeze(-2)
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    return visible


def _paged_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    decode: list[tuple[int, int]] = []  # (keys to read, row)
    for row, context in enumerate(contexts):
        start, end = starts[row], starts[row + 1]
        if context == 0:
            out[start:end] = 0
        elif end - start == 1:
            decode.append((context if sliding_window is None else min(context, sliding_window), row))
        elif end > start:
            out[start:end] = _prefill_row(
                query[start:end],
                k_cache,
                v_cache,
                block_tables[row],
                context,
                scale,
                sliding_window,
                soft_cap,
            )
    for rows in _decode_groups(sorted(decode), k_cache[0].numel() // k_cache.shape[2]):
        tokens = torch.tensor([starts[row] for row in rows])
        lens = [contexts[row] for row in rows]
        tables = block_tables[torch.tensor(rows)]
        out[tokens] = _decode_rows(query[tokens], k_cache, v_cache, tables, lens, scale, sliding_window, soft_cap)
    return out


def _decode_groups(rows_by_len: list[tuple[int, int]], elements_per_token: int) -> list[list[int]]:
    """Split rows, given as ascending (keys to read, row), into groups to be padded and computed together."""
    groups: list[list[int]] = []
    shortest = 0
    for num_keys, row in rows_by_len:
        too_different = num_keys > max(2 * shortest, _DECODE_PADDING)
        if not groups or too_different or len(groups[-1]) * num_keys * elements_per_token > _DECODE_ELEMENTS:
            groups.append([])
            shortest = num_keys
        groups[-1].append(row)
    return groups


def _prefill_row(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of one row's chunk ``[query_len, num_heads, head_dim]``; its queries end at position context
    - 1."""
    block_size = k_cache.shape[2]
    first_pos = context - query.shape[0]
    first_page = 0 if sliding_window is None else max(0, first_pos - sliding_window + 1) // block_size
    first_key = first_page * block_size
    pages = block_table[first_page : -(-context // block_size)].long().unsqueeze(0)
    keys = _gather_pages(k_cache, pages)[:, :, : context - first_key].to(query.dtype)
    values = _gather_pages(v_cache, pages)[:, :, : context - first_key].to(query.dtype)

    tiles = []
    positions = torch.arange(context)
    for begin in range(first_pos, context, _PREFILL_TILE):
        end = min(begin + _PREFILL_TILE, context)
        low = first_key if sliding_window is None else max(first_key, begin - sliding_window + 1)
        tile = query[begin - first_pos : end - first_pos].transpose(0, 1).unsqueeze(0)
        visible = _visible(positions[begin:end], positions[low:end], sliding_window)
        seen = slice(low - first_key, end - first_key)
        tiles.append(_attend(tile, keys[:, :, seen], values[:, :, seen], visible, scale, soft_cap))
    return torch.cat(tiles, dim=2).squeeze(0).transpose(0, 1)


def _decode_rows(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: list[int],
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of one query per row ``[num_rows, num_heads, head_dim]``, all rows padded to the longest.

    The queries that share a KV head stand in SDPA's query dimension, so that each key is read once for all of
    them.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    first_keys = [0 if sliding_window is None else max(0, context - sliding_window) for context in context_lens]
    first_pages = [key // block_size for key in first_keys]
    last_pages = [(context - 1) // block_size for context in context_lens]
    num_pages = max(map(sub, last_pages, first_pages)) + 1
    # Keys are counted from the start of each row's first gathered page from here on.
    begins = [key % block_size for key in first_keys]
    ends = [context - page * block_size for context, page in zip(context_lens, first_pages, strict=True)]

    columns = torch.tensor(first_pages).unsqueeze(1) + torch.arange(num_pages)
    columns = columns.minimum(torch.tensor(last_pages).unsqueeze(1))
    pages = block_tables.gather(1, columns)
    keys, values = _gather_pages(k_cache, pages), _gather_pages(v_cache, pages)
    packed = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)

    begin, end = min(begins), max(ends)
    keys, values = keys[:, :, begin:end].to(query.dtype), values[:, :, begin:end].to(query.dtype)
    if begin == max(begins) and end == min(ends):
        out = _attend(packed, keys, values, None, scale, soft_cap)
    else:
        positions = torch.arange(begin, end)
        visible = positions < torch.tensor(ends).unsqueeze(1)
        if sliding_window is not None:
            visible &= positions >= torch.tensor(begins).unsqueeze(1)
        out = _attend(packed, keys, values, visible[:, None, None], scale, soft_cap)
        if bool(out.isnan().any()):
            # A masked key still meets the query, and 0 x NaN is NaN. Pages that once held a failed row's NaNs
            # are rare, so blank what lies beyond the rows' contexts only once it shows.
            row, position = (~visible).nonzero(as_tuple=True)
            keys[row, :, position] = 0
            values[row, :, position] = 0
            out = _attend(packed, keys, values, visible[:, None, None], scale, soft_cap)
    return out.reshape(num_rows, num_heads, head_dim)


def _gather_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Copy pages ``[num_rows, num_pages]`` into ``[num_rows, num_kv_heads, num_pages * block_size,
    head_dim]``.

    Gathering (page, head) tiles rather than pages puts the heads first without a second copy.
    """
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    tiles = pages.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)
    gathered = cache.view(-1, block_size * head_dim).index_select(0, tiles.flatten())
    return gathered.view(pages.shape[0], num_kv_heads, pages.shape[1] * block_size, head_dim)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Masked attention of ``[batch, heads, num_queries, head_dim]`` over ``[batch, num_kv_heads, num_keys,
    head_dim]``."""
    if soft_cap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
        )
    group_size = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group_size, dim=1).transpose(-1, -2) * scale
    scores = soft_cap * torch.tanh(scores.float() / soft_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1).to(query.dtype) @ values.repeat_interleave(group_size, dim=1)


@dataclass(frozen=True, slots=True)
class _Tuning:
    """Tile sides and launch options of one specialisation."""

    block_m: int  # query heads x queries
    block_n: int  # keys
    num_warps: int
    num_stages: int


def _decode_tuning(head_dim: int, group_size: int) -> _Tuning:
    # tl.dot wants 16 rows at least; a smaller group leaves some idle, which costs nothing: decode waits for
    # memory.
    return _Tuning(max(16, next_power_of_2(group_size)), 64 if head_dim <= 128 else 32, 4, 3)


def _prefill_tuning(head_dim: int, group_size: int) -> _Tuning:
    # The largest tiles of keys that spill no registers on sm_80 either.
    block_m = max(64, next_power_of_2(group_size))
    if head_dim <= 64:
        return _Tuning(block_m, 64, 4, 2)
    return _Tuning(block_m, 32, 4, 3) if head_dim <= 128 else _Tuning(block_m, 32, 8, 2)


_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 256  # below this the second kernel costs more than the parallelism gains


def _num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """Splits per (row, KV head), a power of two: two programs for every multiprocessor, if the context may be
    that long."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = min(-(-2 * num_sms // num_programs), -(-max_context // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS)
    return next_power_of_2(wanted)


def _paged_attention_triton(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_rows = context_lens.shape[0]
    group_size = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    inputs = (query, k_cache, v_cache, block_tables, query_start, context_lens)
    sizes = (
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        scale,
        sliding_window or 0,
        soft_cap or 0.0,
    )
    specialisation = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIM_TILE": next_power_of_2(head_dim),
        "WINDOWED": sliding_window is not None,
        "CAPPED": soft_cap is not None,
    }

    if max_query_len > 1:
        tuning = _prefill_tuning(head_dim, group_size)
        num_tiles = num_tokens // (tuning.block_m // group_size) + num_rows  # an upper bound: one partial tile per row
        _prefill_kernel[(num_tiles, num_kv_heads)](
            *inputs,
            out,
            num_rows,
            *sizes,
            **specialisation,
            BLOCK_M=tuning.block_m,
            BLOCK_N=tuning.block_n,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )

    tuning = _decode_tuning(head_dim, group_size)
    max_context = block_tables.shape[1] * block_size
    num_splits = _num_splits(num_rows * num_kv_heads, max_context, query.device)
    if num_splits == 1:
        partial, lse = out, None
    else:
        partial = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=query.device)
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        *inputs,
        partial,
        lse,
        *sizes,
        **specialisation,
        NUM_SPLITS=num_splits,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if num_splits > 1:
        _combine_splits_kernel[(num_rows, num_heads)](
            partial,
            lse,
            query_start,
            out,
            NUM_HEADS=num_heads,
            NUM_SPLITS=num_splits,
            HEAD_DIM=head_dim,
            DIM_TILE=next_power_of_2(head_dim),
        )
    return out


@jit
def _gather_tile(
    cache_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position: tl.tensor,
    inside: tl.tensor,
    kv_head: tl.tensor,
    dim: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> tl.tensor:
    """The keys or values at some positions of one row, ``[positions, DIM_TILE]``; zeros outside."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    offset = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    mask = inside[:, None]
    if HEAD_DIM != DIM_TILE:
        mask = mask & (dim < HEAD_DIM)[None, :]
    return tl.load(cache_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0)


@jit
def _scores(
    query: tl.tensor, keys: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """Logits in units of log2(e): the softmax below works with exp2."""
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee") * scale
    if CAPPED:
        scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / soft_cap)))
    return scores * 1.4426950408889634


@jit
def _accumulate(
    scores: tl.tensor, values: tl.tensor, acc: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor
) -> tl.tuple:
    """One step of the online softmax: returns acc, row_max and row_sum with these keys taken in."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that has seen no key yet
    probs = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(row_max - base)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum * shrink + tl.sum(probs, 1)


@kernel
def _decode_kernel(
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
        keys = _gather_tile(
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
        scores = _scores(query, keys, scale, soft_cap, CAPPED)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        values = _gather_tile(
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
        acc, row_max, row_sum = _accumulate(scores, values.to(query.dtype), acc, row_max, row_sum)

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if NUM_SPLITS > 1:
        partial_row = (row.to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head) * NUM_SPLITS + split
        tl.store(lse_place, row_max + tl.log2(row_sum), mask=in_group)
    else:
        partial_row = token * NUM_KV_HEADS * GROUP_SIZE + head
    place = partial_ptr + partial_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(place, out.to(partial_ptr.dtype.element_ty), mask=query_mask)


@kernel
def _combine_splits_kernel(
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


@kernel
def _prefill_kernel(
    query_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_M // GROUP_SIZE neighbouring queries of one row, with all query heads of one KV
    head.

    Row r owns the tiles from ``query_start[r] // QUERIES + r`` on: at least as many as it needs, the rest
    leave at once.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP_SIZE  # noqa: N806
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
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
    if (query_len <= 1) | (first_query >= query_len):
        return
    context = tl.load(context_lens_ptr + row)

    lane = tl.arange(0, BLOCK_M)
    query_index = first_query + lane // GROUP_SIZE
    head = kv_head * GROUP_SIZE + lane % GROUP_SIZE
    in_tile = (lane < QUERIES * GROUP_SIZE) & (query_index < query_len)
    query_position = context - query_len + query_index
    dim = tl.arange(0, DIM_TILE)
    query_mask = in_tile[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + query_index).to(tl.int64)
    query_place = query_ptr + token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    query = tl.load(query_place, mask=query_mask, other=0.0)

    # Keys up to the last query of the tile; those before the first query are seen by all, unless a window
    # ends.
    first_position = context - query_len + first_query
    high = tl.minimum(first_position + QUERIES, context)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first_position - sliding_window + 1, 0) // BLOCK_N

    table_ptr = block_tables_ptr + tl.cast(row, tl.int64) * table_stride
    acc = tl.zeros((BLOCK_M, DIM_TILE), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for key_tile in range(begin, tl.cdiv(high, BLOCK_N)):
        position = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = position < high
        keys = _gather_tile(
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
        scores = _scores(query, keys, scale, soft_cap, CAPPED)
        distance = query_position[:, None] - position[None, :]
        visible = distance >= 0
        if WINDOWED:
            visible = visible & (distance < sliding_window)
        scores = tl.where(visible, scores, -float("inf"))
        values = _gather_tile(
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
        acc, row_max, row_sum = _accumulate(scores, values.to(query.dtype), acc, row_max, row_sum)

    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    place = out_ptr + (token[:, None] * (NUM_KV_HEADS * GROUP_SIZE) + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=query_mask)
