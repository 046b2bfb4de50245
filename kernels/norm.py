"""RMSNorm (Zhang & Sennrich, 2019), alone or together with the residual addition that precedes it.

    y = x / sqrt(mean(x²) + eps) · (weight_offset + weight)

Shapes: ``x`` is ``[..., dim]`` with any leading shape, ``weight`` is ``[dim]``; QK-norm is the same call on
``[num_tokens, num_heads, head_dim]``.

Rounding is the same as in the `transformers` models, so that 16-bit activations differ from theirs only by the order of
summation:

* ``weight_offset == 0`` (Llama and its family): normalise in float32, round to ``x.dtype``, then multiply by
  weight.
* ``weight_offset == 1`` (Gemma checkpoints store ``weight - 1``): normalise and multiply in float32, then round once.

With ``residual`` the sum ``x + residual`` is rounded to ``x.dtype`` first; then the norm of the rounded sum is
computed.
"""

from __future__ import annotations

from typing import overload

import torch

from kernels._dispatch import next_power_of_2, runs_on_triton

_ELEMENTS = 2048  # per program; short vectors (QK-norm) share a program


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
    """Compute RMSNorm over the last dimension of ``x`` ``[..., dim]``; the result has ``x.dtype``.

    With ``residual`` (same shape and dtype as ``x``) return ``(norm(x + residual), x + residual)``; the second is the
    residual stream for the next addition. The inputs are not modified.
    """
    if runs_on_triton(x):
        return _rms_norm_triton(x, weight, eps, residual, weight_offset)
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


def _rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    dim = x.shape[-1]
    # The kernel accepts two leading dimensions with separate strides, so that the heads of a packed QKV projection are
    # read in place. Other layouts are copied first.
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        vectors = x.reshape(-1, 1, dim).contiguous()
    else:
        vectors = x.unsqueeze(1) if x.dim() == 2 else x
    outer, inner = vectors.shape[:2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = None if residual is None else residual.contiguous()
    summed = None if residual is None else torch.empty_like(out)
    tile = next_power_of_2(dim)
    rows = max(1, _ELEMENTS // tile)
    from kernels.gpu.norm import rms_norm_kernel

    rms_norm_kernel[(-(-outer * inner // rows),)](
        vectors,
        added,
        weight,
        out,
        summed,
        vectors.stride(0),
        vectors.stride(1),
        outer * inner,
        inner,
        eps,
        weight_offset,
        DIM=dim,
        ROWS=rows,
        TILE=tile,
        HAS_RESIDUAL=residual is not None,
        OFFSET_WEIGHT=weight_offset != 0.0,
        num_warps=4 if tile <= 4096 else 8,
    )
    return out if summed is None else (out, summed)
