"""Writes of keys and values into the paged KV cache (PagedAttention; Kwon et al., SOSP 2023).

One layer's cache is ``[num_blocks, num_kv_heads, block_size, head_dim]``. The tile of one (block, head) is contiguous,
because attention reads such tiles, one head at a time. A *slot* is one token's position: ``slot = block_id * block_size
+ offset``.

Rules: a token with a negative slot (padding in a captured graph) is not written. The slots in one call are distinct.
Keys and values are cast to the cache's dtype, or quantised as in `kernels.kv_quantised`. Slots that are not in
``slot_mapping`` keep their content.
"""

from __future__ import annotations

import torch

from kernels._dispatch import next_power_of_2, runs_on_triton
from kernels.fp8 import native_fp8
from kernels.kv_cache_reference import write_kv_reference
from kernels.native.kv_cache import can_write, write_kv_native
from kernels.native.serving import native


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot, in place.

    key, value: ``[num_tokens, num_kv_heads, head_dim]``, any strides over tokens and heads; they may differ in size.
    k_cache, v_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``, or quantised (`kernels.kv_quantised`).
    slot_mapping: ``[num_tokens]`` int64; a token with a negative slot is not written.
    """
    if not runs_on_triton(key):
        kernels = native()
        if kernels is not None and can_write(key, value, k_cache, v_cache):
            write_kv_native(key, value, k_cache, v_cache, slot_mapping, kernels)
        else:
            write_kv_reference(key, value, k_cache, v_cache, slot_mapping)
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    from kernels.gpu.kv_cache import write_kv_kernel

    write_kv_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=k_cache.shape[2],
        HEAD_DIM=head_dim,
        VALUE_DIM=value.shape[2],
        NATIVE_FP8=native_fp8(key),
        HEADS=next_power_of_2(num_kv_heads),
        TILE=next_power_of_2(head_dim),
        VALUE_TILE=next_power_of_2(value.shape[2]),
    )
