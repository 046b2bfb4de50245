"""The KV cache in plain torch: writes as `kernels.kv_cache` defines them, and reads."""

from __future__ import annotations

import torch

from kernels.kv_quantised import QUANTISED, from_parts, parts_of, quantise_heads


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Plain torch form of `write_kv`, also used on a CPU if keys and values are converted or quantised."""
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    for cache, given in ((k_cache, key), (v_cache, value)):
        if cache.dtype in QUANTISED:
            codes, scales = parts_of(cache)
            codes[block, :, offset], scales[block, :, offset] = quantise_heads(given, cache.dtype)
        else:
            cache[block, :, offset] = given.to(cache.dtype)


def read_kv(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the keys or values in ``slots`` (int64 of any shape): ``[*slots.shape, num_kv_heads, head_dim]``."""
    block, offset = slots // cache.shape[2], slots % cache.shape[2]
    if cache.dtype in QUANTISED:
        codes, scales = parts_of(cache)
        return from_parts(codes[block, :, offset], scales[block, :, offset]).to(dtype)
    return cache[block, :, offset].to(dtype)
