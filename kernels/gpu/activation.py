"""Triton kernels of `kernels.activation`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, tl


@kernel
def silu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, token_stride: tl.tensor, intermediate: tl.tensor, TILE: tl.constexpr
) -> None:
    """Compute one tile of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < intermediate
    gate = tl.load(gate_up_ptr + token * token_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + token * token_stride + intermediate + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + token * intermediate + column, product.to(gate.dtype), mask=inside)


@kernel
def clamped_swiglu_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_stride: tl.tensor,
    intermediate: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Compute one tile of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < intermediate
    pairs = gate_up_ptr + token * token_stride + 2 * column
    gate = tl.load(pairs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pairs + 1, mask=inside, other=0.0).to(tl.float32)
    # Comparisons keep NaN, unlike a minimum.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    tl.store(out_ptr + token * intermediate + column, result.to(out_ptr.dtype.element_ty), mask=inside)
