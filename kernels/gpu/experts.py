"""Triton kernels of `kernels.experts`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel, tl
from kernels.gpu.fp8_linear import multiply_blocks
from kernels.gpu.weight_only import multiply_chunks


@jit
def _rows_of_tile(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    TALL: tl.constexpr,
) -> tl.tuple:
    """Return a tile's expert, and for each row: whether it exists, its pair, and its places in x and in the result.

    A program finds its expert by counting the experts whose tiles all come before it. Without rows, the expert is
    ``num_experts``.
    """
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    begins = tl.load(starts_ptr + number, mask=number < num_experts, other=0)
    ends = tl.load(starts_ptr + number + 1, mask=number < num_experts, other=0)
    tiles = (ends - begins + TALL - 1) // TALL
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(number < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(number == expert, begins, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    place = begin + (tile - before) * TALL + tl.arange(0, TALL)
    inside = place < end
    pair = tl.load(order_ptr + place, mask=inside, other=0)
    source = place if SCATTERS else pair // TOP_K
    target = pair if SCATTERS else place
    return expert, inside, pair, source.to(tl.int64), target.to(tl.int64)


@jit
def _store(
    total: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert: tl.tensor,
    inside: tl.tensor,
    pair: tl.tensor,
    target: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    SCATTERS: tl.constexpr,
) -> None:
    """Add the expert's bias, multiply with the factors of the pairs, and store the rows."""
    has_output = output < outputs
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * outputs + output, mask=has_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    if SCATTERS:
        total *= tl.load(factors_ptr + pair, mask=inside, other=0.0)[:, None]
    tl.store(
        out_ptr + target[:, None] * outputs + output[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & has_output[None, :],
    )


@kernel
def grouped_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
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
    """Compute one tile per program: some rows of one expert by some outputs."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    x_base = x_ptr + source[:, None] * x_stride
    weight_base = weight_ptr + (expert.to(tl.int64) * outputs + output)[None, :] * inputs
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(0, inputs, DEEP):
        left = inputs - start
        x = tl.load(x_base + (start + deep)[None, :], mask=inside[:, None] & (deep < left)[None, :], other=0.0)
        weight = tl.load(
            weight_base + (start + deep)[:, None], mask=(output < outputs)[None, :] & (deep < left)[:, None], other=0.0
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, SCATTERS)


@kernel
def weight_only_experts_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    weight_factors_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    codes_stride: tl.tensor,
    groups: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    NATIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """As `grouped_product_kernel`, over the codes of `kernels.weight_only`."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    number = expert.to(tl.int64)
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, 32)
    of_expert = number * groups * outputs
    zeros = zeros_ptr
    if zeros_ptr is not None:
        zeros = zeros_ptr + of_expert
    total = multiply_chunks(
        x_ptr + source[:, None] * x_stride + deep[None, :],
        codes_ptr + (number * outputs + output)[None, :] * codes_stride + deep[:, None],
        scales_ptr + of_expert,
        zeros,
        inside[:, None],
        output,
        outputs,
        inputs,
        0,
        (inputs + 63) // 64,
        KIND,
        GROUP,
        SCALES,
        OFFSETS,
        NATIVE,
        RAGGED,
        TALL,
        WIDE,
    )
    if weight_factors_ptr is not None:
        factors = tl.load(weight_factors_ptr + number * outputs + output, mask=output < outputs, other=0.0)
        total *= factors[None, :]
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, SCATTERS)


@kernel
def fp8_experts_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    output_blocks: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> None:
    """As `grouped_product_kernel`, over rows and weights in e4m3."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    number = expert.to(tl.int64)
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    total = multiply_blocks(
        x_ptr + source[:, None] * inputs + deep[None, :],
        x_scales_ptr + source * groups,
        codes_ptr + (number * outputs + output)[None, :] * inputs + deep[:, None],
        scales_ptr + (number * output_blocks + output // HIGH) * groups,
        inside,
        output < outputs,
        inputs,
        GROUP,
        NATIVE,
        TALL,
        WIDE,
        DEEP,
    )
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, SCATTERS)
