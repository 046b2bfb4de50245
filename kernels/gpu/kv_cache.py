"""Triton kernels of `kernels.kv_cache`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl
from kernels.gpu.kv_quantised import quantise_groups, quantise_tile


@kernel_with(varying=("slot_mapping_ptr",))
def write_kv_kernel(
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
    VALUE_DIM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
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
    value_dim = tl.arange(0, VALUE_TILE)[None, :]
    inside = (head < NUM_KV_HEADS) & (value_dim < VALUE_DIM)
    place = value_ptr + token * value_token_stride + head * value_head_stride + value_dim
    value = tl.load(place, mask=inside, other=0.0)
    store_heads(
        v_cache_ptr, value, slot, head, value_dim, head < NUM_KV_HEADS, NUM_KV_HEADS, BLOCK_SIZE, VALUE_DIM, NATIVE_FP8
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
    """Store one token's heads ``[heads, dims]``, padded with zeros, in a cache of any type, where ``wanted``."""
    CACHE_TYPE: tl.constexpr = cache_ptr.dtype.element_ty  # noqa: N806
    if tl.int16 == CACHE_TYPE:
        _store_groups(cache_ptr, x, slot, head, wanted, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    else:
        SCALED: tl.constexpr = tl.int8 == CACHE_TYPE or tl.uint8 == CACHE_TYPE  # noqa: N806
        EXTRA: tl.constexpr = 4 if SCALED else 0  # noqa: N806
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        first = (block * NUM_KV_HEADS + head) * (BLOCK_SIZE * (HEAD_DIM + EXTRA))
        codes, scales = quantise_tile(x, CACHE_TYPE, NATIVE_FP8)
        tl.store(cache_ptr + first + offset * HEAD_DIM + dim, codes, mask=wanted & (dim < HEAD_DIM))
        if SCALED:
            scales_ptr = cache_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(scales_ptr + (first + BLOCK_SIZE * HEAD_DIM) // 4 + offset, scales, mask=wanted)


@jit
def _store_groups(
    cache_ptr: tl.tensor,
    x: tl.tensor,
    slot: tl.tensor,
    head: tl.tensor,
    wanted: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store one token's heads in an int4 cache."""
    GROUPS: tl.constexpr = HEAD_DIM // 32  # noqa: N806
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    pairs, scales, zeros = quantise_groups(x)
    group = tl.arange(0, x.shape[1] // 32)[None, :]
    mask = wanted & (group < GROUPS)
    # The codes of a group take 16 bytes, and the scale and zero take four.
    first = (block * NUM_KV_HEADS + head) * (BLOCK_SIZE * GROUPS * 20)
    place = first + (offset * GROUPS + group) * 16
    bytes_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(bytes_ptr + place[:, :, None] + tl.arange(0, 16)[None, None, :], pairs, mask=mask[:, :, None])
    halves_ptr = cache_ptr.to(tl.pointer_type(tl.float16), bitcast=True)
    place = first // 2 + BLOCK_SIZE * GROUPS * 8 + (offset * GROUPS + group) * 2
    tl.store(halves_ptr + place, scales, mask=mask)
    tl.store(halves_ptr + place + 1, zeros, mask=mask)
