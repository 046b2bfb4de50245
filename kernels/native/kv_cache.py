"""Writes to the KV cache with the native CPU kernels; `kernels.kv_cache` defines the arguments."""

from __future__ import annotations

import torch

from kernels.native.library import Native
from kernels.native.structures import CKvWrite


def can_write(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Return whether `write_kv_native` supports these tensors: equal dtypes, and contiguous heads on a CPU."""
    return (
        key.device.type == "cpu"
        and key.dtype == k_cache.dtype
        and value.dtype == v_cache.dtype
        and key.stride(-1) == value.stride(-1) == 1
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
    )


def write_kv_native(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kernels: Native,
) -> None:
    """Copy keys and values into their slots; the caller has checked `can_write`."""
    slot_mapping = slot_mapping.contiguous()
    key_size, value_size = key.element_size(), value.element_size()
    kernels.write_kv(
        CKvWrite(
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_token_stride=key.stride(0) * key_size,
            key_head_stride=key.stride(1) * key_size,
            value_token_stride=value.stride(0) * value_size,
            value_head_stride=value.stride(1) * value_size,
            k_cache=k_cache.data_ptr(),
            v_cache=v_cache.data_ptr(),
            slots=slot_mapping.data_ptr(),
            tokens=len(key),
            heads=key.shape[1],
            block_size=k_cache.shape[2],
            key_bytes=key.shape[2] * key_size,
            value_bytes=value.shape[2] * value_size,
        )
    )
