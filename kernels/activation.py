"""Gated activation of a SwiGLU MLP (Shazeer, 2020): ``silu(gate) · up``.

The gate and up projections are one GEMM with concatenated outputs: ``gate_up`` is ``[num_tokens, 2 * intermediate]``,
with the gate in the first half. The result is ``[num_tokens, intermediate]``.

Rounding is the same as in `transformers`: silu is computed in float32 and rounded to the dtype of ``gate_up``; then the
product is rounded again.

`ClampedSwiglu` is the activation of gpt-oss's experts. Gate and up alternate in its input, as in the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._dispatch import runs_on_triton

_TILE = 1024  # elements per program


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate_up[:, :I]) * gate_up[:, I:]`` for ``gate_up`` ``[num_tokens, 2 * I]``, in its dtype."""
    if not runs_on_triton(gate_up):
        return silu_mul_reference(gate_up)
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, -(-(width // 2) // _TILE))
    from kernels.gpu.activation import silu_mul_kernel

    silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width // 2, TILE=_TILE)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_mul`, which is also the CPU path."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """``gate · sigmoid(alpha · gate) · (up + 1)`` with gate at most ``limit``, and up at most ± ``limit``."""

    alpha: float
    limit: float


def gated(gate_up: torch.Tensor, clamped: ClampedSwiglu | None) -> torch.Tensor:
    """Return the activation of ``gate_up`` ``[num_tokens, 2 * I]``; without ``clamped``, that of `silu_mul`.

    With ``clamped``, gate i is in column 2 i and up i in column 2 i + 1, and the result is rounded once.
    """
    if clamped is None:
        return silu_mul(gate_up)
    if not runs_on_triton(gate_up):
        return gated_reference(gate_up, clamped)
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    from kernels.gpu.activation import clamped_swiglu_kernel

    clamped_swiglu_kernel[(num_tokens, -(-(width // 2) // _TILE))](
        gate_up, out, gate_up.stride(0), width // 2, clamped.alpha, clamped.limit, TILE=_TILE
    )
    return out


def gated_reference(gate_up: torch.Tensor, clamped: ClampedSwiglu | None) -> torch.Tensor:
    """Plain torch form of `gated`, which is also the CPU path."""
    if clamped is None:
        return silu_mul_reference(gate_up)
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide[..., ::2].clamp(max=clamped.limit), wide[..., 1::2].clamp(-clamped.limit, clamped.limit)
    return (gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)).to(gate_up.dtype)
