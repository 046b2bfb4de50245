"""Conversion to and from fp8 e4m3 for a KV cache (OCP format: 1 sign, 4 exponent, 3 mantissa bits; largest value 448).

The values are stored as bits in ``uint8`` tensors, so that block copies need no special case. Values are rounded to
nearest, ties to even; larger magnitudes saturate at 448; NaN stays NaN. `kernels.kv_quantised` adds the scales.

Conversion from e4m3 is exact, because float16 can represent all values of the format. GPUs with compute capability 8.9
or higher convert in hardware (``NATIVE``). Older GPUs and the interpreter use integer operations, with the same result.
"""

from __future__ import annotations

import torch

from kernels._dispatch import architecture

LARGEST = 448.0


def quantize(x: torch.Tensor) -> torch.Tensor:
    """Convert ``x`` to e4m3 bits: uint8 of the same shape."""
    return x.to(torch.float32).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def dequantize(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert e4m3 bits (uint8) to ``dtype``."""
    return bits.view(torch.float8_e4m3fn).to(dtype)


def native_fp8(tensor: torch.Tensor) -> bool:
    """Return whether the GPU that holds ``tensor`` converts e4m3 in hardware."""
    return architecture(tensor) >= 89
