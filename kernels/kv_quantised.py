"""KV cache with eight bits per element: each key or value vector of a head is stored as bytes with one scale.

In int8, bytes range from -127 to 127 and the scale is ``max |x| / 127``. In fp8 (a ``uint8`` tensor with the bits of
`kernels.fp8`), the scale is ``max |x| / 448``, which brings all elements into the range of e4m3.

The cache of one layer is ``[num_blocks, num_kv_heads, block_size, head_dim + 4]``. One head of one block holds the
bytes of all its tokens, then their scales in float32. A block is therefore self-contained and can be copied alone.
`kernels.kv_cache`, `kernels.qkv` and `kernels.decoder` write such a cache. head_dim must be a multiple of four.
"""

from __future__ import annotations

import torch

from kernels.fp8 import LARGEST, dequantize, quantize

SCALE_BYTES = 4
QUANTISED = (torch.int8, torch.uint8)
"""Element types of a quantised cache: int8, and uint8 for fp8."""


def cached_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the size of the last dimension of a cache with this dtype, which includes the scale if it is quantised."""
    return head_dim + SCALE_BYTES if dtype in QUANTISED else head_dim


def head_size(cache: torch.Tensor) -> int:
    """Return head_dim: the size of the last dimension without the bytes of the scale."""
    return cache.shape[-1] - SCALE_BYTES if cache.dtype in QUANTISED else cache.shape[-1]


def quantise_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes ``[..., head_dim]`` and scales ``[...]`` float32 of keys or values ``[..., head_dim]``."""
    wide = x.float()
    scales = wide.abs().amax(-1) / (127 if dtype == torch.int8 else LARGEST)
    scaled = wide * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    return scaled.round().nan_to_num().to(torch.int8) if dtype == torch.int8 else quantize(scaled), scales


def to_quantised(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a cache ``[num_blocks, num_kv_heads, block_size, head_dim]`` of any float dtype to a quantised cache."""
    codes, scales = quantise_heads(cache, dtype)
    parts = (codes.flatten(2), scales.contiguous().view(dtype))
    return torch.cat(parts, 2).view(*cache.shape[:3], cache.shape[3] + SCALE_BYTES)


def from_quantised(cache: torch.Tensor) -> torch.Tensor:
    """Dequantise a quantised cache to ``[num_blocks, num_kv_heads, block_size, head_dim]`` float32."""
    return from_parts(*parts_of(cache))


def from_parts(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise keys or values to ``[..., head_dim]`` float32, from bytes ``[..., head_dim]`` and scales ``[...]``."""
    values = codes.float() if codes.dtype == torch.int8 else dequantize(codes, torch.float32)
    return values * scales[..., None]


def from_cache(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert whole blocks from a cache of any dtype, quantised or not, to ``dtype``."""
    return from_quantised(cache).to(dtype) if cache.dtype in QUANTISED else cache.to(dtype)


def parts_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a quantised cache.

    Returns:
        The bytes ``[num_blocks, num_kv_heads, block_size, head_dim]``, and the scales
        ``[num_blocks, num_kv_heads, block_size]`` float32.
    """
    num_blocks, num_heads, block_size, size = cache.shape
    flat = cache.view(num_blocks, num_heads, block_size * size)
    codes = flat[..., : block_size * (size - SCALE_BYTES)]
    scales = flat[..., block_size * (size - SCALE_BYTES) :].view(torch.float32)
    return codes.unflatten(2, (block_size, -1)), scales  # type: ignore[no-untyped-call]
