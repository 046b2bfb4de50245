"""Paged attention on a GPU: which kernels a batch needs, with which tiles, and how many splits.

Nothing here depends on a length that only the device knows, so that the launches can be captured in a graph: the
grid of prefill follows from T and R alone, that of decode from R and the number of splits, which is fixed by the
longest context that the block tables could hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._triton import next_power_of_2
from kernels.paged_attention.decode import combine_splits_kernel, decode_kernel
from kernels.paged_attention.prefill import prefill_kernel

_MAX_SPLITS = 64
_MIN_KEYS_PER_SPLIT = 256  # below this the second kernel costs more than the parallelism gains


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


def _num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """Splits per (row, KV head), a power of two: two programs for every multiprocessor, if the context may be
    that long."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    wanted = min(-(-2 * num_sms // num_programs), -(-max_context // _MIN_KEYS_PER_SPLIT), _MAX_SPLITS)
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
    }

    if max_query_len > 1:
        tuning = _prefill_tuning(head_dim, group_size)
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

    tuning = _decode_tuning(head_dim, group_size)
    max_context = block_tables.shape[1] * block_size
    num_splits = _num_splits(num_rows * num_kv_heads, max_context, query.device)
    if num_splits == 1:
        partial, lse = out, None
    else:
        partial = torch.empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=query.device)
    decode_kernel[(num_rows, num_kv_heads, num_splits)](
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
        combine_splits_kernel[(num_rows, num_heads)](
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
