"""Triton kernels of `kernels.fp8`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, tl


@jit
def fp8_from_float(x: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Device function of `quantize`."""
    if NATIVE:
        bits = x.to(tl.float32).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        word = x.to(tl.float32).to(tl.uint32, bitcast=True)
        magnitude = word & 0x7FFFFFFF
        # The exponent bias is 127 in float32 and 7 in e4m3. Rounding drops 20 mantissa bits.
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        normal = tl.minimum(rounded, 120 * 8 + 0x7E) - 120 * 8
        # Values below 2^-6 are multiples of 2^-9. Adding 2^23 leaves the rounded multiple in the low bits.
        steps = magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
        subnormal = steps.to(tl.uint32, bitcast=True) & 0xFF
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        bits = (code | ((word >> 24) & 0x80)).to(tl.uint8)
    return bits


@jit
def float_from_fp8(bits: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Device function of `dequantize`, with float16 results."""
    if NATIVE:
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = bits.to(tl.uint16)
        # float16 has exponent bias 15, so the value is too small by a factor of 2^8.
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value


@jit
def floats_from_int8_pairs(pairs: tl.tensor) -> tl.tuple:
    """Return as float16 the low and the high elements of int8 pairs, each stored in a uint16."""
    both = pairs.to(tl.int16, bitcast=True)
    return ((both << 8) >> 8).to(tl.float16), (both >> 8).to(tl.float16)


@jit
def floats_from_fp8_pairs(pairs: tl.tensor, NATIVE: tl.constexpr) -> tl.tuple:
    """Return as float16 the low and the high elements of e4m3 pairs, each stored in a uint16.

    One instruction loads many 16-bit elements from shared memory for the matrix units, but bytes need one load each. A
    kernel therefore loads pairs, and converts them in registers with one instruction per two elements.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 bytes;
                .reg .b16 two, rest;
                prmt.b32 bytes, $2, $2, 0x0020;
                mov.b32 {two, rest}, bytes;
                cvt.rn.f16x2.e4m3x2 $0, two;
                prmt.b32 bytes, $2, $2, 0x0031;
                mov.b32 {two, rest}, bytes;
                cvt.rn.f16x2.e4m3x2 $1, two;
            }
            """,
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = float_from_fp8((pairs & 0xFF).to(tl.uint8), False)
        high = float_from_fp8((pairs >> 8).to(tl.uint8), False)
    return low, high
