"""Writes of keys and values into the paged KV cache (PagedAttention; Kwon et al., SOSP 2023).

The cache of one layer is ``[num_blocks, num_kv_heads, block_size, head_dim]``: block-major, and head-major
inside a block. The tile of one (block, head) is contiguous, because attention reads such tiles, one head at a
time. A *slot* is the place of one token: ``slot = block_id * block_size + offset``.

Rules: a token with a negative slot is not written (padding of a captured graph). Slots within one call are distinct.
Keys and values are cast to the cache's dtype, or quantised as `kernels.kv_quantised` says. Slots that are not in
``slot_mapping`` keep their content.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import jit, kernel_with, next_power_of_2, runs_on_triton, tl
from kernels.fp8 import native_fp8
from kernels.kv_quantised import QUANTISED, parts_of, quantise_heads, quantise_tile


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot, in place.

    key, value: ``[num_tokens, num_kv_heads, head_dim]``, any strides over tokens and heads.
    k_cache, v_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``; quantised: see `kernels.kv_quantised`.
    slot_mapping: ``[num_tokens]`` int64; negative: do not write.
    """
    if not runs_on_triton(key):
        write_kv_reference(key, value, k_cache, v_cache, slot_mapping)
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    _write_kv_kernel[(num_tokens,)](
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
        NATIVE_FP8=native_fp8(key),
        HEADS=next_power_of_2(num_kv_heads),
        TILE=next_power_of_2(head_dim),
    )


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Plain torch form of `write_kv`; also the CPU path."""
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


@kernel_with(varying=("slot_mapping_ptr",))
def _write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write all heads of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, TILE)[None, :]
    inside = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + dim, mask=inside, other=0.0)
    store_heads(k_cache_ptr, key, slot, head, dim, head < NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, NATIVE_FP8)
    value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + dim, mask=inside, other=0.0)
    store_heads(
        v_cache_ptr, value, slot, head, dim, head < NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, NATIVE_FP8
    )


@jit
def store_heads(
    cache_ptr: tl.tensor,
    x: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    dim: tl.tensor,
    wanted: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
) -> None:
    """Store heads of one token ``[heads, dims]``, padded with zeros, in a cache of any type, where ``wanted``."""
    CACHE_TYPE: tl.constexpr = cache_ptr.dtype.element_ty  # noqa: N806
    SCALED: tl.constexpr = tl.int8 == CACHE_TYPE or tl.uint8 == CACHE_TYPE  # noqa: N806
    EXTRA: tl.constexpr = 4 if SCALED else 0  # noqa: N806
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    first = (block * NUM_KV_HEADS + head) * (BLOCK_SIZE * (HEAD_DIM + EXTRA))
    codes, scales = quantise_tile(x, CACHE_TYPE, NATIVE_FP8)
    tl.store(cache_ptr + first + offset * HEAD_DIM + dim, codes, mask=wanted & (dim < HEAD_DIM))
    if SCALED:
        scales_ptr = cache_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales_ptr + (first + BLOCK_SIZE * HEAD_DIM) // 4 + offset, scales, mask=wanted)
