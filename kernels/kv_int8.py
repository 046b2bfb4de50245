"""KV cache in int8 on a CPU: each key and value of a head is bytes times a scale of its own, ``max |x| / 127``.

The cache of one layer is ``[num_blocks, num_kv_heads, block_size, head_dim + 4]`` int8. One head of one block holds the
bytes of all its tokens, then their scales in float32. A block is therefore complete in itself, so that copies of blocks
need nothing else. `kernels.decoder` writes such a cache; its values are the same at every level.
"""

from __future__ import annotations

import torch

_SCALE_BYTES = 4


def cached_size(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last dimension of a cache of this dtype."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def to_int8(cache: torch.Tensor) -> torch.Tensor:
    """Convert ``[num_blocks, num_kv_heads, block_size, head_dim]`` of any float dtype to an int8 cache."""
    wide = cache.float()
    scales = wide.abs().amax(-1) / 127
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (wide * factors[..., None]).round().nan_to_num().to(torch.int8)
    return torch.cat((codes.flatten(2), scales.contiguous().view(torch.int8)), 2).view(
        *cache.shape[:3], cache.shape[3] + _SCALE_BYTES
    )


def from_int8(cache: torch.Tensor) -> torch.Tensor:
    """Return what an int8 cache holds, ``[num_blocks, num_kv_heads, block_size, head_dim]`` float32."""
    *heads, block_size, size = cache.shape
    codes, scales = cache.flatten(2).split([block_size * (size - _SCALE_BYTES), block_size * _SCALE_BYTES], 2)  # type: ignore[no-untyped-call]
    values: torch.Tensor = codes.reshape(*heads, block_size, -1) * scales.contiguous().view(torch.float32)[..., None]
    return values
