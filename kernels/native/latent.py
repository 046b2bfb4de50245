"""Latent attention on a CPU with the native kernels, and products with a matrix per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.kv_quantised import head_size
from kernels.native.library import Native
from kernels.native.structures import FORMATS, KV_FORMATS, CHeadProducts, CLatentAttention


def supports_latent_attention(query: torch.Tensor, latent_cache: torch.Tensor, rotary_cache: torch.Tensor) -> bool:
    """Return whether the native kernels support the dtypes and sizes of these tensors."""
    rank, rotary_dim = head_size(latent_cache), head_size(rotary_cache)
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and latent_cache.dtype in KV_FORMATS
        and rank % 16 == 0
        and rotary_dim % 16 == 0
        and latent_cache.is_contiguous()
        and rotary_cache.is_contiguous()
        and not query.is_meta
    )


def latent_attention_native(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    kernels: Native,
) -> torch.Tensor:
    """Compute `latent_attention` for CPU tensors that `supports_latent_attention` accepts."""
    num_tokens, num_heads, _ = query.shape
    rank, rotary_dim = head_size(latent_cache), head_size(rotary_cache)
    wide = query.float().contiguous()
    out = torch.empty(num_tokens, num_heads, rank)
    block_tables, query_start, context_lens = (x.contiguous() for x in (block_tables, query_start, context_lens))
    kernels.latent_attention(
        CLatentAttention(
            query=wide.data_ptr(),
            out=out.data_ptr(),
            latent_cache=latent_cache.data_ptr(),
            rotary_cache=rotary_cache.data_ptr(),
            cache_format=KV_FORMATS[latent_cache.dtype],
            num_heads=num_heads,
            rank=rank,
            rotary_dim=rotary_dim,
            block_size=latent_cache.shape[2],
            block_tables=block_tables.data_ptr(),
            table_stride=block_tables.shape[1],
            query_start=query_start.data_ptr(),
            context_lens=context_lens.data_ptr(),
            num_rows=len(context_lens),
            scale=scale,
        )
    )
    return out.to(query.dtype)


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """Matrices ``[num_heads, outputs, inputs]`` in the packed format of `kernels.native`."""

    weights: torch.Tensor
    kernels: Native

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.weights.dtype


def pack_heads(weights: torch.Tensor, *, kernels: Native) -> PackedHeads | None:
    """Return a packed copy of ``[num_heads, outputs, inputs]``; None if the kernels do not support them."""
    _, outputs, inputs = weights.shape
    if weights.dtype not in FORMATS or weights.device.type != "cpu" or outputs % 16 or inputs % 16:
        return None
    packed = weights.clone(memory_format=torch.contiguous_format)
    for of_head in packed:
        kernels.library.quire_pack_in_place(FORMATS[weights.dtype], of_head.data_ptr(), outputs, inputs)
    return PackedHeads(packed, kernels)


def head_products_native(x: torch.Tensor, heads: PackedHeads, *, keep_rest: bool = False) -> torch.Tensor:
    """Multiply each head's elements by its matrix.

    Args:
        x: ``[T, num_heads, width]``; the first ``inputs`` elements are multiplied.
        heads: the matrices.
        keep_rest: append the other elements to the result.

    Returns:
        ``[T, num_heads, outputs]`` float32, or with ``keep_rest`` ``[T, num_heads, outputs + width - inputs]``.
    """
    num_heads, outputs, inputs = heads.weights.shape
    wide = x.float().contiguous()
    num_tokens, _, width = wide.shape
    rest = width - inputs if keep_rest else 0
    out = torch.empty(num_tokens, num_heads, outputs + rest)
    if rest:
        out[..., outputs:] = wide[..., inputs:]
    heads.kernels.head_products(
        CHeadProducts(
            format=FORMATS[heads.dtype],
            packed=heads.weights.data_ptr(),
            tokens=num_tokens,
            heads=num_heads,
            outputs=outputs,
            inputs=inputs,
            x=wide.data_ptr(),
            x_token_stride=num_heads * width,
            x_head_stride=width,
            out=out.data_ptr(),
            out_token_stride=num_heads * (outputs + rest),
            out_head_stride=outputs + rest,
        )
    )
    return out
