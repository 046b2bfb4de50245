"""Triton kernels of `kernels.fp8_linear`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel, kernel_with, tl
from kernels.gpu.fp8 import float_from_fp8, fp8_from_float


@kernel
def quantise_rows_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Quantise one group of the inputs of one row per program."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, SIZE)
    inside = place < GROUP
    x = tl.load(x_ptr + row * inputs + group * GROUP + place, mask=inside, other=0.0).to(tl.float32)
    # NaN and infinity propagate to the scale.
    poison = tl.sum(x * 0.0, 0)
    scale = tl.max(tl.abs(x), 0) / 448.0 + poison
    factor = tl.where(scale > 0, 1.0 / scale, 0.0)
    tl.store(scales_ptr + row * groups + group, scale)
    tl.store(codes_ptr + row * inputs + group * GROUP + place, fp8_from_float(x * factor, NATIVE), mask=inside)


@jit
def multiply_blocks(
    x_rows: tl.tensor,
    x_scales_rows: tl.tensor,
    has_row: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    split: tl.tensor,
    inputs_per_split: tl.tensor,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> tl.tensor:
    """Return the products ``[TALL, WIDE]`` over one part of the inputs, with their scales.

    ``x_rows`` and ``x_scales_rows`` ``[TALL]`` point to the rows' first inputs and scales.
    """
    deep = tl.arange(0, DEEP)
    x_base = x_rows[:, None] + deep[None, :]
    codes_base = codes_ptr + output.to(tl.int64)[None, :] * inputs + deep[:, None]
    scales_base = scales_ptr + output // HIGH * groups
    has_output = output < outputs
    first = split * inputs_per_split
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(first, tl.minimum(first + inputs_per_split, inputs), DEEP):
        x = tl.load(x_base + start, mask=has_row[:, None], other=0)
        codes = tl.load(codes_base + start, mask=has_output[None, :], other=0)
        if NATIVE:
            part = tl.dot(x.to(tl.float8e4nv, bitcast=True), codes.to(tl.float8e4nv, bitcast=True))
        else:
            part = tl.dot(float_from_fp8(x, False), float_from_fp8(codes, False))
        if GROUP != 0:
            group = start // GROUP
            part *= tl.load(x_scales_rows + group, mask=has_row, other=0.0)[:, None]
            part *= tl.load(scales_base + group, mask=has_output, other=0.0)[None, :]
        total += part
    if GROUP == 0:
        total *= tl.load(x_scales_rows, mask=has_row, other=0.0)[:, None]
        total *= tl.load(scales_base, mask=has_output, other=0.0)[None, :]
    return total


@kernel_with(varying=("rows",))
def fp8_linear_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> None:
    """Compute one tile of rows by one tile of outputs per program."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    has_row, has_output = row < rows, output < outputs
    total = multiply_blocks(
        x_ptr + row.to(tl.int64) * inputs,
        x_scales_ptr + row.to(tl.int64) * groups,
        has_row,
        codes_ptr,
        scales_ptr,
        output,
        outputs,
        inputs,
        groups,
        0,
        inputs,
        GROUP,
        HIGH,
        NATIVE,
        TALL,
        WIDE,
        DEEP,
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
