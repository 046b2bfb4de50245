"""Launches paged attention on a GPU: chooses kernels and tiles for a batch.

The launches depend only on values that the host knows, so they can be captured in a graph:

* The prefill grid depends on the numbers of tokens, rows and leading decode rows, and on the width of the block tables.
* The decode grid depends on the number of KV heads and on the GPU. The device splits the keys among its programs
  (`schedule`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels._dispatch import architecture, next_power_of_2, num_multiprocessors
from kernels.fp8 import native_fp8
from kernels.kv_quantised import INT4, QUANTISED
from kernels.paged_attention.decode import decode_kernel
from kernels.paged_attention.prefill import combine_parts_kernel, prefill_kernel
from kernels.paged_attention.schedule import DecodeSchedule, schedule_decode
from kernels.paged_attention.tuning import Key, tuning_for

_SHARES_TILE = 16
"""Maximum number of shares that decode combines at a time."""
_COMBINED_ELEMENTS = 4096
"""Maximum total number of elements in the shares that decode combines at a time."""
MOST_PARTS = 16
"""Maximum number of parts into which prefill divides the keys."""
_MIN_PART = 1024
"""Minimum number of keys in a part. With fewer keys, combining the parts costs more than parallelism gains."""


@lru_cache(maxsize=1024)  # all layers of a step call it with the same arguments
def parts_of_keys(num_programs: int, num_multiprocessors: int, longest: int) -> int:
    """Return the number of parts into which prefill divides the keys for each tile of queries.

    The result minimises the estimated time of a launch in which each multiprocessor runs one program at a time.

    Args:
        num_programs: number of programs if the keys are not divided.
        num_multiprocessors: number of multiprocessors on the GPU.
        longest: upper bound of the context lengths in tokens.
    """

    def relative_time(parts: int) -> float:
        waves = -(-num_programs * parts // num_multiprocessors)
        return waves / parts * (1 + 0.05 * (parts - 1))

    return min(range(1, max(1, min(MOST_PARTS, longest // _MIN_PART)) + 1), key=relative_time)


def paged_attention_triton(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    min_query_len: int,
    max_query_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    num_leading_decodes: int,
    schedule: DecodeSchedule | None,
) -> torch.Tensor:
    """Compute `paged_attention` for CUDA tensors without reading a value back from the device."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group_size, dim_tile = num_heads // num_kv_heads, next_power_of_2(head_dim)
    sm, quantised = architecture(query), k_cache.dtype in QUANTISED
    kv_bytes = 4 if query.dtype == torch.float32 else 1 if quantised else k_cache.dtype.itemsize
    int8 = k_cache.dtype == torch.int8
    if quantised:  # read in pairs
        pair = torch.uint8 if k_cache.dtype == INT4 else torch.uint16
        k_cache, v_cache = k_cache.view(pair), v_cache.view(pair)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    strides = (query.stride(0), query.stride(1), block_tables.stride(0))
    # Convert both to float, because Triton would compile a separate kernel for integers.
    scale, cap = float(scale), float(soft_cap or 0.0)
    specialisation = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": group_size,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIM_TILE": dim_tile,
        "CAPPED": soft_cap is not None,
        "SINKS": sinks is not None,
        "NATIVE_FP8": native_fp8(query),
        "INT8": int8,
    }

    if max_query_len > 1:
        num_rows = context_lens.shape[0]
        tuning = tuning_for(Key("prefill", sm, dim_tile, kv_bytes), group_size)
        queries = tuning.block_m // group_size
        num_chunks = num_rows - num_leading_decodes
        # An upper bound: each row with a chunk has at most one partial tile. The leading decode rows have no tiles.
        num_tiles = num_tokens // queries + num_chunks if num_chunks > 1 else -(-num_tokens // queries)
        num_parts = parts_of_keys(
            num_tiles * num_kv_heads, num_multiprocessors(query), block_tables.shape[1] * block_size
        )
        split = (num_parts, num_tokens) if num_parts > 1 else (0, 0)
        partial = torch.empty(*split, num_heads, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(*split, num_heads, dtype=torch.float32, device=query.device)
        prefill_kernel[(num_tiles, num_kv_heads, num_parts)](
            query,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            sinks,
            out,
            partial,
            lse,
            num_leading_decodes,
            num_tokens,
            num_rows,
            *strides,
            scale,
            sliding_window or 0,
            cap,
            **specialisation,
            WINDOWED=sliding_window is not None,
            BLOCK_M=tuning.block_m,
            BLOCK_N=tuning.block_n,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )
        if num_parts > 1:
            combine_parts_kernel[(num_tokens, num_heads)](
                partial,
                lse,
                out,
                num_tokens,
                num_parts,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                DIM_TILE=dim_tile,
                PARTS_TILE=MOST_PARTS,
            )
    if min_query_len > 1:
        return out

    if schedule is None:
        schedule = schedule_decode(query_start, context_lens, num_kv_heads=num_kv_heads, sliding_window=sliding_window)
    assert schedule is not None
    tuning = tuning_for(Key("decode", sm, dim_tile, kv_bytes), group_size)
    max_shares, fields = schedule.shares.shape
    partial = torch.empty(max_shares, num_heads, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(max_shares, num_heads, dtype=torch.float32, device=query.device)
    group_tile = next_power_of_2(group_size)
    decode_kernel[(num_kv_heads, schedule.programs.shape[0] - 1)](
        query,
        k_cache,
        v_cache,
        block_tables,
        schedule.shares,
        schedule.programs,
        schedule.finished,
        sinks,
        out,
        partial,
        lse,
        *strides,
        scale,
        cap,
        **specialisation,
        FIELDS=fields,
        GROUP_TILE=group_tile,
        SHARES_TILE=max(1, min(_SHARES_TILE, _COMBINED_ELEMENTS // (group_tile * dim_tile))),
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out
