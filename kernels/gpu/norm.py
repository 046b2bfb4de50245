"""Triton kernels of `kernels.norm`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl


@kernel_with(varying=("num_vectors",))
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    summed_ptr: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    num_vectors: tl.tensor,
    inner: tl.tensor,
    eps: tl.tensor,
    weight_offset: tl.tensor,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OFFSET_WEIGHT: tl.constexpr,
) -> None:
    """Compute ROWS vectors per program. Vector v is x[v // inner, v % inner]; outputs and residual are contiguous."""
    vector = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, TILE)[None, :]
    inside = (vector < num_vectors) & (dim < DIM)
    x = tl.load(
        x_ptr + (vector // inner) * outer_stride + (vector % inner) * inner_stride + dim,
        mask=inside,
        other=0.0,
    )
    place = vector * DIM + dim
    if HAS_RESIDUAL:
        added = tl.load(residual_ptr + place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / DIM + eps)
    weight = tl.load(weight_ptr + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    if not OFFSET_WEIGHT:
        normed = normed.to(x.dtype).to(tl.float32)
    normed = normed * (weight_offset + weight)
    tl.store(out_ptr + place, normed.to(x.dtype), mask=inside)
