"""Layers with recurrent state, with the native CPU kernels; `kernels.recurrent` defines and checks the arguments."""

from __future__ import annotations

import torch

from kernels.native.library import Native
from kernels.native.structures import FORMATS, CConvolution, CDeltaRule


def delta_rule_native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    normalise: bool,
    kernels: Native,
) -> torch.Tensor:
    """Compute `kernels.recurrent.delta_rule_reference` in float32; return the output in the dtype of ``query``.

    ``state`` is contiguous float32 and is updated in place.
    """
    rows, tokens, value_heads, value_dim = value.shape
    query, key, value = map(_with_contiguous_tokens, (query, key, value))
    gate, beta = gate.contiguous(), beta.float().contiguous()
    out = torch.empty(rows, tokens, value_heads, value_dim, dtype=query.dtype)
    token_dim = 0 if tokens == 1 else 1
    kernels.delta_rule(
        CDeltaRule(
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            query_stride=query.stride(token_dim),
            key_stride=key.stride(token_dim),
            value_stride=value.stride(token_dim),
            gate=gate.data_ptr(),
            beta=beta.data_ptr(),
            out=out.data_ptr(),
            state=state.data_ptr(),
            format=FORMATS[query.dtype],
            normalise=int(normalise),
            rows=rows,
            tokens=tokens,
            key_heads=key.shape[2],
            value_heads=value_heads,
            key_dim=key.shape[3],
            value_dim=value_dim,
        )
    )
    return out


def _with_contiguous_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[rows, tokens, heads, width]`` with one stride between all tokens, and dense tokens."""
    rows, tokens, _, width = x.shape
    dense = x.stride(3) == 1 and x.stride(2) == width
    even = rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if dense and even else x.contiguous()


def convolve_native(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    kernels: Native,
) -> torch.Tensor:
    """Compute `kernels.recurrent.convolve_reference`; ``state`` is contiguous and is updated in place."""
    rows, channels = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    weight = weight.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(rows, channels, dtype=x.dtype)
    kernels.convolve(
        CConvolution(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            state=state.data_ptr(),
            out=out.data_ptr(),
            format=FORMATS[x.dtype],
            silu=int(silu),
            rows=rows,
            channels=channels,
            width=weight.shape[1],
        )
    )
    return out
