"""KV cache in eight or four bits per element: each key or value vector of a head is stored as codes with scales.

In int8, codes range from -127 to 127 and the scale is ``max |x| / 127``. In fp8 (a ``uint8`` tensor with the bits of
`kernels.fp8`), the scale is ``max |x| / 448``, which brings all elements into the range of e4m3.

In int4 (an ``int16`` tensor, whose elements have four codes each), each group of 32 elements of a vector has its own
scale and zero, both float16: an element is ``code * scale + zero``, with codes from 0 to 15. ``zero`` is the smallest
element of the group, and the scale is ``(max - min) / 15`` (as the values of KIVI; Liu et al., 2024). Byte j of a group
has code j in its lower half and code j + 16 in its upper half. Elements beyond the range of float16 make the scale or
the zero infinite, so that a row with them fails instead of continuing with clipped elements.

One layer's cache is ``[num_blocks, num_kv_heads, block_size, cached_size(head_dim)]``. One head of one block holds
the codes of all its tokens, then their scales: a float32 per token, or in int4 a pair (scale, zero) per token and
group. A block is therefore self-contained and can be copied alone. `kernels.kv_cache`, `kernels.qkv` and
`kernels.decoder` write such a cache. head_dim must be a multiple of four, or in int4 of 32.
"""

from __future__ import annotations

import torch

from kernels.fp8 import LARGEST, dequantize, quantize

INT4 = torch.int16
"""Element type of an int4 cache: each element has four codes."""
DTYPES = {"int8": torch.int8, "fp8": torch.uint8, "int4": INT4}
"""Element type for each kind of quantised cache."""
QUANTISED = tuple(DTYPES.values())
SCALE_BYTES = 4
"""Bytes of a vector's scale; in int4, of a group's scale and zero."""
GROUP = 32
"""Elements of a group in int4."""
_HIGHEST_CODE = 15


def cached_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last dimension's size in a cache with this dtype, including the scales if it is quantised."""
    return _codes_size(head_dim, dtype) + _scales_size(head_dim, dtype)


def head_size(cache: torch.Tensor) -> int:
    """Return head_dim, the number of elements per key or value in the cache."""
    size = cache.shape[-1]
    if cache.dtype == INT4:
        return size // cached_size(GROUP, INT4) * GROUP
    return size - SCALE_BYTES if cache.dtype in QUANTISED else size


def _codes_size(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim // 4 if dtype == INT4 else head_dim


def _scales_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the size of a vector's scales, in elements of ``dtype``."""
    if dtype == INT4:
        return head_dim // GROUP * SCALE_BYTES // dtype.itemsize
    return SCALE_BYTES if dtype in QUANTISED else 0


def quantise_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise keys or values ``[..., head_dim]``.

    Returns:
        The codes and the scales as in `parts_of`; their leading dimensions are those of ``x``.
    """
    wide = x.float()
    if dtype == INT4:
        return _quantise_groups(wide)
    scales = wide.abs().amax(-1) / (127 if dtype == torch.int8 else LARGEST)
    scaled = wide * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    return scaled.round().nan_to_num().to(torch.int8) if dtype == torch.int8 else quantize(scaled), scales


def _quantise_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    least, most = groups.aminmax(dim=-1)
    pairs = torch.stack(((most - least) / _HIGHEST_CODE, least), -1).half()
    scales, zeros = pairs.float().unbind(-1)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = ((groups - zeros[..., None]) * inverse[..., None]).round().clamp(0, _HIGHEST_CODE).nan_to_num()
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return (low | high << 4).flatten(-2).view(INT4), pairs


def to_quantised(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a cache ``[num_blocks, num_kv_heads, block_size, head_dim]`` of any float dtype to a quantised cache."""
    codes, scales = quantise_heads(cache, dtype)
    parts = (codes.flatten(2), scales.flatten(2).contiguous().view(dtype))
    return torch.cat(parts, 2).view(*cache.shape[:3], cached_size(cache.shape[3], dtype))


def from_quantised(cache: torch.Tensor) -> torch.Tensor:
    """Dequantise a quantised cache to ``[num_blocks, num_kv_heads, block_size, head_dim]`` float32."""
    return from_parts(*parts_of(cache))


def from_parts(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise keys or values to ``[..., head_dim]`` float32, from the codes and scales of `parts_of`."""
    if codes.dtype == INT4:
        octets = codes.contiguous().view(torch.uint8).unflatten(-1, (-1, GROUP // 2))  # type: ignore[no-untyped-call]
        groups = torch.cat((octets & 15, octets >> 4), -1).float()
        return (groups * scales[..., :1].float() + scales[..., 1:].float()).flatten(-2)
    values = codes.float() if codes.dtype == torch.int8 else dequantize(codes, torch.float32)
    return values * scales[..., None]


def from_cache(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert whole blocks from a cache of any dtype, quantised or not, to ``dtype``."""
    return from_quantised(cache).to(dtype) if cache.dtype in QUANTISED else cache.to(dtype)


def parts_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a quantised cache.

    Returns:
        The codes ``[num_blocks, num_kv_heads, block_size, head_dim]`` (in int4, ``head_dim / 4``) in the cache's dtype,
        and the scales ``[num_blocks, num_kv_heads, block_size]`` float32; in int4, the scales and zeros
        ``[num_blocks, num_kv_heads, block_size, head_dim / 32, 2]`` float16.
    """
    num_blocks, num_heads, block_size, size = cache.shape
    head_dim = head_size(cache)
    flat = cache.view(num_blocks, num_heads, block_size * size)
    end = block_size * _codes_size(head_dim, cache.dtype)
    codes = flat[..., :end].unflatten(2, (block_size, -1))  # type: ignore[no-untyped-call]
    if cache.dtype == INT4:
        pairs = flat[..., end:].view(torch.float16)
        return codes, pairs.unflatten(2, (block_size, head_dim // GROUP, 2))  # type: ignore[no-untyped-call]
    return codes, flat[..., end:].view(torch.float32)
