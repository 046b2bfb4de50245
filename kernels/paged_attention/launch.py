"""Paged attention on a GPU: which kernels a batch needs, with which tiles, and how many splits.

Nothing here depends on a length that only the device knows, so that the launches can be captured in a graph: the
grid of prefill follows from T and R alone, that of decode from R and the longest context that the block tables could
hold. How many of the splits that the grid has room for are used, the kernel decides.
"""

from __future__ import annotations

import torch

from kernels._triton import architecture, next_power_of_2, num_multiprocessors
from kernels.fp8 import native_fp8
from kernels.paged_attention.decode import combine_splits_kernel, decode_kernel
from kernels.paged_attention.prefill import prefill_kernel
from kernels.paged_attention.tuning import Key, tuning_for

_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 256  # below this the second kernel costs more than the parallelism gains
_PROGRAMS_PER_SM = 4  # that get a share of the keys: more than run at once, so that the last ones to end wait little
_GRID_PER_SM = 32  # programs in the grid, most of which leave at once: room for one long row among short ones


def num_splits(num_programs: int, max_context: int, num_sms: int) -> int:
    """Room for splits per (row, KV head) in the grid of decode, a power of two.

    ``num_programs`` is rows times KV heads, ``max_context`` the longest context that the block tables could hold.
    """
    wanted = min(-(-_GRID_PER_SM * num_sms // num_programs), -(-max_context // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS)
    return next_power_of_2(wanted)


def paged_attention_triton(
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
    """`paged_attention` of CUDA tensors; never reads a value back from the device."""
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
        "NATIVE_FP8": native_fp8(query),
    }
    dim_tile, kv_bytes, sm = next_power_of_2(head_dim), k_cache.dtype.itemsize, architecture(query)

    if max_query_len > 1:
        tuning = tuning_for(Key("prefill", sm, dim_tile, kv_bytes), group_size)
        num_tiles = num_tokens // (tuning.block_m // group_size) + num_rows  # an upper bound: one partial tile per row
        prefill_kernel[(num_tiles, num_kv_heads)](
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

    tuning = tuning_for(Key("decode", sm, dim_tile, kv_bytes), group_size)
    num_sms = num_multiprocessors(query)
    splits = num_splits(num_rows * num_kv_heads, block_tables.shape[1] * block_size, num_sms)
    partial = lse = None
    if splits > 1:
        partial = torch.empty(num_rows, num_heads, splits, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, num_heads, splits, dtype=torch.float32, device=query.device)
    sharing = {
        "NUM_SPLITS": splits,
        "MIN_TILES": _MIN_KEYS_PER_SPLIT // tuning.block_n,
        "ROWS_TILE": next_power_of_2(num_rows),
        "BLOCK_N": tuning.block_n,
    }
    wanted_programs = _PROGRAMS_PER_SM * num_sms
    decode_kernel[(num_rows, num_kv_heads, splits)](
        *inputs,
        out,
        partial,
        lse,
        num_rows,
        wanted_programs,
        *sizes,
        **specialisation,
        **sharing,
        BLOCK_M=tuning.block_m,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if splits > 1:
        combine_splits_kernel[(num_rows, num_heads)](
            partial,
            lse,
            query_start,
            context_lens,
            out,
            num_rows,
            wanted_programs,
            sliding_window or 0,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            DIM_TILE=dim_tile,
            WINDOWED=sliding_window is not None,
            **sharing,
        )
    return out
