"""Latent attention over a paged cache (MLA; DeepSeek-V2, 2024), with absorbed projections.

A token stores one *latent* vector of ``rank`` elements and one *rotary key* of ``rotary_dim`` elements. All heads share
both. The keys and values of head h are linear in the latent: ``key = [U_h latent, rotary]`` and ``value = V_h latent``.
Attention therefore does not need the keys and values of the heads. `HeadProjections` multiplies queries by ``U_h``
beforehand (*absorption*), and results by ``V_h`` afterwards. In between, attention has one key per token, and the first
elements of that key are the value:

    query           [T, num_heads, rank + rotary_dim]
    latent_cache    [num_blocks, 1, block_size, rank]; contiguous, or quantised (`kernels.kv_quantised`)
    rotary_cache    [num_blocks, 1, block_size, rotary_dim]; the same
    result          [T, num_heads, rank], dtype of query

The other arguments and rules are those of `kernels.paged_attention`. The logits are ``scale * (q · [latent, rotary])``.
A query sees the keys up to its position. A row with context 0 has result zero. Content beyond a row's context does not
affect the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._dispatch import runs_on_triton
from kernels.latent_attention_reference import latent_attention_reference
from kernels.native.latent import (
    PackedHeads,
    head_products_native,
    latent_attention_native,
    pack_heads,
    supports_latent_attention,
)
from kernels.native.serving import native

__all__ = ["HeadProjections", "latent_attention", "latent_attention_reference"]


def latent_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
) -> torch.Tensor:
    """Compute causal attention of every query over its row's latent vectors (shapes and rules: see the module).

    ``max_query_len`` is the length of the longest chunk in the batch.
    """
    tables = (block_tables, query_start, context_lens)
    if runs_on_triton(query):
        from kernels.gpu.latent_launch import latent_attention_triton

        return latent_attention_triton(query, latent_cache, rotary_cache, *tables, max_query_len, scale)
    kernels = native()
    if kernels is not None and supports_latent_attention(query, latent_cache, rotary_cache):
        return latent_attention_native(query, latent_cache, rotary_cache, *tables, scale=scale, kernels=kernels)
    return latent_attention_reference(query, latent_cache, rotary_cache, *tables, scale=scale)


@dataclass(frozen=True, slots=True)
class HeadProjections:
    """The projections from a latent vector to the keys and values of each head.

    keys: ``U``, ``[num_heads, key_dim, rank]``.
    values: ``V``, ``[num_heads, value_dim, rank]``.
    packed: both as `PackedHeads`, for the native kernels; None to use the tensors.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None
    packed: tuple[PackedHeads, PackedHeads] | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, num_heads: int, value_dim: int) -> HeadProjections:
        """Return views of a layer's weight ``[num_heads * (key_dim + value_dim), rank]``."""
        by_head = weight.view(num_heads, -1, weight.shape[1])
        return cls(by_head[:, : by_head.shape[1] - value_dim], by_head[:, -value_dim:])

    def for_serving(self) -> HeadProjections:
        """Return packed copies if the native kernels multiply them, else the same projections."""
        kernels = native()
        if kernels is None or self.keys is None or self.values is None:
            return self
        packed = (
            pack_heads(self.keys.transpose(1, 2), kernels=kernels),
            pack_heads(self.values, kernels=kernels),
        )
        if packed[0] is None or packed[1] is None:
            return self
        return HeadProjections(None, None, (packed[0], packed[1]))

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return the queries for `latent_attention` from those of the model.

        Args:
            query: ``[T, num_heads, key_dim + rotary_dim]``, the rotary part last.

        Returns:
            ``[T, num_heads, rank + rotary_dim]`` in the dtype of ``query``; float32 with packed projections.
        """
        if self.packed is not None:
            return head_products_native(query, self.packed[0], keep_rest=True)
        assert self.keys is not None
        key_dim = self.keys.shape[1]
        absorbed = torch.bmm(query[..., :key_dim].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((absorbed, query[..., key_dim:]), dim=-1)

    def values_of(self, attended: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weighted sums of the values ``[T, num_heads, value_dim]`` from those of the latent vectors.

        Args:
            attended: the result of `latent_attention`.
            dtype: type of the result.
        """
        if self.packed is not None:
            return head_products_native(attended, self.packed[1]).to(dtype)
        assert self.values is not None
        return torch.bmm(attended.to(dtype).transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)
