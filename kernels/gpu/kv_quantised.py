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
