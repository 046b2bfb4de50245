"""Writing keys and values into the paged cache (PagedAttention; Kwon et al., SOSP 2023).

The cache of one layer is ``[num_blocks, num_kv_heads, block_size, head_dim]``: block-major, and head-major inside a
block, so that the tile of one (block, head) is contiguous: attention reads such tiles, one head at a time. A *slot*
is the place of one token: ``slot = block_id * block_size + offset``.

Rules: a negative slot writes nothing (padding rows of a captured graph); two tokens of one call never name the same
slot; key and value are cast to the cache's dtype; blocks that no slot names keep their content.
"""

from __future__ import annotations

import torch


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot, in place.

    key, value: ``[num_tokens, num_kv_heads, head_dim]``, any strides over tokens and heads.
    k_cache, v_cache: ``[num_blocks, num_kv_heads, block_size, head_dim]``.
    slot_mapping: ``[num_tokens]`` int64; negative: do not write.
    """
    write_kv_reference(key, value, k_cache, v_cache, slot_mapping)


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
    k_cache[block, :, offset] = key.to(k_cache.dtype)
    v_cache[block, :, offset] = value.to(v_cache.dtype)
