"""Paged attention on a CPU: gathers KV blocks and calls torch's fused attention.

Decode rows are computed in groups of similar length, padded to the longest row. Prefill rows are computed one by one,
in tiles of queries.
"""

from __future__ import annotations

from operator import sub

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv_quantised import from_cache, head_size
from kernels.paged_attention_reference import visible_keys

_PREFILL_TILE = 256  # queries per SDPA call on a CPU; limits the mask's size and skips the keys above the diagonal
_DECODE_PADDING = 128  # keys; padding a row by at most this many is cheaper than another SDPA call
_DECODE_ELEMENTS = 1 << 20  # keys gathered at once; keeps K and V in the core's cache


def paged_attention_cpu(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `paged_attention` for CPU tensors."""
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
                sinks,
            )
    for rows in _decode_groups(sorted(decode), k_cache[0].numel() // k_cache.shape[2]):
        tokens = torch.tensor([starts[row] for row in rows])
        lens = [contexts[row] for row in rows]
        tables = block_tables[torch.tensor(rows)]
        out[tokens] = _decode_rows(
            query[tokens], k_cache, v_cache, tables, lens, scale, sliding_window, soft_cap, sinks
        )
    return out


def _decode_groups(rows_by_len: list[tuple[int, int]], elements_per_token: int) -> list[list[int]]:
    """Split rows, given as ascending (keys to read, row), into groups that are padded and computed together."""
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
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention for a row's chunk ``[query_len, num_heads, head_dim]``, which ends at the row's last token."""
    block_size = k_cache.shape[2]
    first_pos = context - query.shape[0]
    first_page = 0 if sliding_window is None else max(0, first_pos - sliding_window + 1) // block_size
    first_key = first_page * block_size
    pages = block_table[first_page : -(-context // block_size)].long().unsqueeze(0)
    keys = _gather_pages(k_cache, pages, query.dtype)[:, :, : context - first_key]
    values = _gather_pages(v_cache, pages, query.dtype)[:, :, : context - first_key]

    tiles = []
    positions = torch.arange(context)
    for begin in range(first_pos, context, _PREFILL_TILE):
        end = min(begin + _PREFILL_TILE, context)
        low = first_key if sliding_window is None else max(first_key, begin - sliding_window + 1)
        tile = query[begin - first_pos : end - first_pos].transpose(0, 1).unsqueeze(0)
        visible = visible_keys(positions[begin:end], positions[low:end], sliding_window)
        seen = slice(low - first_key, end - first_key)
        of_heads = None if sinks is None else sinks.view(1, -1, 1, 1)
        tiles.append(_attend(tile, keys[:, :, seen], values[:, :, seen], visible, scale, soft_cap, of_heads))
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
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention for one query per row ``[num_rows, num_heads, head_dim]``, with rows padded to the longest.

    SDPA's query dimension holds the query heads that share a KV head, so that each key is read once for all of them.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    first_keys = [0 if sliding_window is None else max(0, context - sliding_window) for context in context_lens]
    first_pages = [key // block_size for key in first_keys]
    last_pages = [(context - 1) // block_size for context in context_lens]
    num_pages = max(map(sub, last_pages, first_pages)) + 1
    # From here on, count keys from the start of each row's first gathered block.
    begins = [key % block_size for key in first_keys]
    ends = [context - page * block_size for context, page in zip(context_lens, first_pages, strict=True)]

    columns = torch.tensor(first_pages).unsqueeze(1) + torch.arange(num_pages)
    columns = columns.minimum(torch.tensor(last_pages).unsqueeze(1))
    pages = block_tables.gather(1, columns)
    keys, values = _gather_pages(k_cache, pages, query.dtype), _gather_pages(v_cache, pages, query.dtype)
    packed = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    of_heads = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1)

    begin, end = min(begins), max(ends)
    keys, values = keys[:, :, begin:end], values[:, :, begin:end]
    if begin == max(begins) and end == min(ends):
        out = _attend(packed, keys, values, None, scale, soft_cap, of_heads)
    else:
        positions = torch.arange(begin, end)
        visible = positions < torch.tensor(ends).unsqueeze(1)
        if sliding_window is not None:
            visible &= positions >= torch.tensor(begins).unsqueeze(1)
        out = _attend(packed, keys, values, visible[:, None, None], scale, soft_cap, of_heads)
        if bool(out.isnan().any()):
            # A masked key is still multiplied, and 0 x NaN is NaN. Only failed rows leave NaNs in their blocks. So zero
            # the keys beyond the rows' contexts only if the result has NaNs.
            row, position = (~visible).nonzero(as_tuple=True)
            keys[row, :, position] = 0
            values[row, :, position] = 0
            out = _attend(packed, keys, values, visible[:, None, None], scale, soft_cap, of_heads)
    return out.reshape(num_rows, num_heads, head_dim)


def _gather_pages(cache: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy blocks ``[num_rows, num_pages]`` into ``[num_rows, num_kv_heads, num_pages * block_size, head_dim]``.

    The result has type ``dtype``.

    The copy gathers (block, head) tiles instead of blocks, so that heads precede tokens without a second copy.
    """
    num_kv_heads, block_size, size = cache.shape[1:]
    tiles = pages.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)
    gathered = cache.view(-1, block_size * size).index_select(0, tiles.flatten()).view(-1, 1, block_size, size)
    values = from_cache(gathered, dtype)
    return values.view(pages.shape[0], num_kv_heads, pages.shape[1] * block_size, head_size(cache))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute masked attention.

    query: ``[batch, heads, num_queries, head_dim]``. keys, values:
    ``[batch, num_kv_heads, num_keys, head_dim]``. sinks: ``[1, heads, num_queries or 1, 1]``.
    """
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
        )
    group_size = query.shape[1] // keys.shape[1]
    scores = (query @ keys.repeat_interleave(group_size, dim=1).transpose(-1, -2) * scale).float()
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    num_keys = keys.shape[2]
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :num_keys].to(query.dtype) @ values.repeat_interleave(group_size, dim=1)
