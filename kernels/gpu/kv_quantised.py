"""Triton kernels of `kernels.kv_quantised`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, tl
from kernels.gpu.fp8 import fp8_from_float


@jit
def quantise_tile(x: tl.tensor, CACHE_TYPE: tl.constexpr, NATIVE_FP8: tl.constexpr) -> tl.tuple:
    """Device form of `quantise_heads` for heads ``[heads, dims]`` padded with zeros; casts if not quantised."""
    wide = x.to(tl.float32)
    if CACHE_TYPE == tl.int8 or CACHE_TYPE == tl.uint8:  # noqa: SIM300 - evaluated by the compiler
        LIMIT: tl.constexpr = 127.0 if CACHE_TYPE == tl.int8 else 448.0  # noqa: N806, SIM300
        largest = tl.max(tl.abs(wide), 1, keep_dims=True)
        scales = largest / LIMIT
        scaled = wide * tl.where(scales > 0, 1.0 / tl.where(scales > 0, scales, 1.0), 0.0)
        if CACHE_TYPE == tl.int8:  # noqa: SIM300
            # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
            codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
        else:
            codes = fp8_from_float(scaled, NATIVE_FP8)
    else:
        scales = tl.zeros((x.shape[0], 1), tl.float32)
        codes = x.to(CACHE_TYPE)
    return codes, scales


@jit
def quantise_groups(x: tl.tensor) -> tl.tuple:
    """Device form of `quantise_heads` in int4, for heads ``[heads, dims]`` padded with zeros.

    Returns:
        The bytes ``[heads, groups, 16]``, and the scales and zeros ``[heads, groups]``.
    """
    HEADS: tl.constexpr = x.shape[0]  # noqa: N806
    GROUPS: tl.constexpr = x.shape[1] // 32  # noqa: N806
    groups = tl.reshape(x.to(tl.float32), (HEADS, GROUPS, 32))
    least, most = tl.min(groups, 2), tl.max(groups, 2)
    poison = tl.sum(groups * 0.0, 2)  # NaN and infinity propagate to the scale
    scales = ((most - least) / 15.0 + poison).to(tl.float16)
    zeros = least.to(tl.float16)
    wide = scales.to(tl.float32)[:, :, None]
    inverse = tl.where(wide > 0, 1.0 / tl.where(wide > 0, wide, 1.0), 0.0)
    scaled = (groups - zeros.to(tl.float32)[:, :, None]) * inverse
    scaled = tl.where(scaled > 0, tl.where(scaled < 15, scaled, 15.0), 0.0)  # 0 if NaN
    # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)
    halves = tl.reshape(codes, (HEADS, GROUPS, 2, 16))
    pairs = tl.sum(halves << (tl.arange(0, 2) * 4)[None, None, :, None], 2)
    return pairs.to(tl.uint8), scales, zeros
