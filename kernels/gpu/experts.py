"""Triton kernels of `kernels.experts`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, tl


@kernel
def grouped_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> None:
    """Compute one tile per program: some rows of one expert by some outputs.

    Each program finds its expert by counting the experts whose tiles all come before it.
    """
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    begins = tl.load(starts_ptr + number, mask=number < num_experts, other=0)
    ends = tl.load(starts_ptr + number + 1, mask=number < num_experts, other=0)
    tiles = (ends - begins + TALL - 1) // TALL
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= num_experts:
        return
    before = tl.sum(tl.where(number < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(number == expert, begins, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    place = begin + (tile - before) * TALL + tl.arange(0, TALL)
    inside = place < end
    pair = tl.load(order_ptr + place, mask=inside, other=0)
    source = place if SCATTERS else pair // TOP_K
    target = pair if SCATTERS else place

    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    x_base = x_ptr + source.to(tl.int64)[:, None] * x_stride
    weight_base = weight_ptr + (expert.to(tl.int64) * outputs + output)[None, :] * inputs
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(0, inputs, DEEP):
        left = inputs - start
        x = tl.load(x_base + (start + deep)[None, :], mask=inside[:, None] & (deep < left)[None, :], other=0.0)
        weight = tl.load(
            weight_base + (start + deep)[:, None], mask=(output < outputs)[None, :] & (deep < left)[:, None], other=0.0
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    if SCATTERS:
        total *= tl.load(factors_ptr + pair, mask=inside, other=0.0)[:, None]
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * outputs + output[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (output < outputs)[None, :],
    )
