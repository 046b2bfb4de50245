"""RMSNorm (Zhang & Sennrich, 2019), alone or together with the residual addition that precedes it.

    y = x / sqrt(mean(x²) + eps) · (weight_offset + weight)

Shapes: ``x`` is ``[..., dim]`` with any leading shape, ``weight`` is ``[dim]``; QK-norm is the same call on
``[num_tokens, num_heads, head_dim]``.

Rounding is that of the models in `transformers`, so that 16-bit activations agree with theirs bit for bit:

* ``weight_offset == 0`` (Llama and its family): normalise in float32, round to ``x.dtype``, then multiply by weight.
* ``weight_offset == 1`` (Gemma stores ``weight - 1``): normalise and multiply in float32, then round once.

With ``residual`` the sum ``x + residual`` is rounded to ``x.dtype`` first and the norm is taken of the rounded sum.
"""

from __future__ import annotations

from typing import overload

import torch


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: None = None, weight_offset: float = 0.0
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension of ``x`` ``[..., dim]``, result in ``x.dtype``.

    With ``residual`` (same shape and dtype as ``x``) returns ``(norm(x + residual), x + residual)``: the second is the
    residual stream for the next addition. Nothing is modified in place.
    """
    if residual is None:
        return rms_norm_reference(x, weight, eps, weight_offset=weight_offset)
    return rms_norm_reference(x, weight, eps, residual=residual, weight_offset=weight_offset)


@overload
def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: None = None, weight_offset: float = 0.0
) -> torch.Tensor: ...
@overload
def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor, weight_offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `rms_norm`; float64 inputs are computed in float64. Also the CPU path."""
    summed = x if residual is None else x + residual
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = summed.to(wide)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight_offset == 0.0:
        normed = (weight * normed.to(x.dtype)).to(x.dtype)
    else:
        normed = (normed * (weight_offset + weight.to(wide))).to(x.dtype)
    return normed if residual is None else (normed, summed)
