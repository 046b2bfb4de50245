"""Triton kernels of `kernels.weight_only`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl
from kernels.gpu.fp8 import float_from_fp8


@jit
def _values(codes: tl.tensor, KIND: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Return the values of codes in float32, without zero points and scales."""
    if KIND == 1:
        # e2m1 has exponent bias 1 and float16 has 15: the bits in float16 are a number that is 2^14 too small.
        wide = codes.to(tl.uint16)
        half = ((wide & 8) << 12) | ((wide & 7) << 9)
        values = half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == 3:
        values = float_from_fp8(codes, NATIVE).to(tl.float32)
    else:
        values = codes.to(tl.float32)
    return values


@jit
def _scales(scales: tl.tensor, SCALES: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Return stored scales in float32."""
    if SCALES == 1:
        values = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif SCALES == 2:
        values = float_from_fp8(scales, NATIVE).to(tl.float32)
    else:
        values = scales.to(tl.float32)
    return values


@jit
def _weights(
    codes: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    first: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Return 32 inputs from ``first`` on of the weights, in float32; with one group, without its scale."""
    values = _values(codes, KIND, NATIVE)
    if GROUP == 16:
        places = ((first + tl.arange(0, 32)) // GROUP)[:, None] * outputs + output[None, :]
    elif GROUP == 0:
        places = output[None, :]
    else:
        places = (first // GROUP * outputs + output)[None, :]
    has_place = (output < outputs)[None, :]
    if KIND == 0 and not OFFSETS:
        if zeros_ptr is None:
            values -= 8.0
        else:
            values -= tl.load(zeros_ptr + places, mask=has_place, other=0).to(tl.float32)
    if GROUP != 0:
        values *= _scales(tl.load(scales_ptr + places, mask=has_place, other=0), SCALES, NATIVE)
    if OFFSETS:
        values -= tl.load(zeros_ptr + places, mask=has_place, other=0.0)
    return values


@jit
def multiply_chunks(
    x_rows: tl.tensor,
    has_row: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    codes_stride: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    split: tl.tensor,
    chunks_per_split: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    NATIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Return the products ``[TALL, WIDE]`` over one part of the inputs, with the scales and factors of the weights.

    ``x_rows`` ``[TALL]`` points to the rows' first inputs. With ``RAGGED``, the last chunk has only 32 inputs.
    """
    deep = tl.arange(0, 32)
    x_base = x_rows[:, None] + deep[None, :]
    codes_base = codes_ptr + output.to(tl.int64)[None, :] * codes_stride + deep[:, None]
    has_row = has_row[:, None]
    has_output = (output < outputs)[None, :]
    first_chunk = split * chunks_per_split
    end_chunk = tl.minimum(first_chunk + chunks_per_split, (inputs + 63) // 64)
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for chunk in range(first_chunk, end_chunk):
        first = chunk * 64
        second = first + 32
        x_low = tl.load(x_base + first, mask=has_row, other=0.0)
        if RAGGED:
            x_high = tl.load(x_base + second, mask=has_row & (second + tl.arange(0, 32) < inputs)[None, :], other=0.0)
            second = tl.minimum(second, inputs - 32)  # the padding has no scales
        else:
            x_high = tl.load(x_base + second, mask=has_row, other=0.0)
        if KIND <= 1:
            pairs = tl.load(codes_base + chunk * 32, mask=has_output, other=0)
            low, high = pairs & 15, pairs >> 4
        else:
            low = tl.load(codes_base + first, mask=has_output, other=0)
            high = tl.load(codes_base + first + 32, mask=has_output, other=0)
        low_weights = _weights(low, scales_ptr, zeros_ptr, first, output, outputs, KIND, GROUP, SCALES, OFFSETS, NATIVE)
        total = tl.dot(x_low, low_weights.to(x_low.dtype), total, input_precision="ieee")
        high_weights = _weights(
            high, scales_ptr, zeros_ptr, second, output, outputs, KIND, GROUP, SCALES, OFFSETS, NATIVE
        )
        total = tl.dot(x_high, high_weights.to(x_low.dtype), total, input_precision="ieee")
    if GROUP == 0:
        scales = tl.load(scales_ptr + output, mask=output < outputs, other=0)
        total *= _scales(scales, SCALES, NATIVE)[None, :]
    if factors_ptr is not None:
        total *= tl.load(factors_ptr + output, mask=output < outputs, other=0.0)[None, :]
    return total


@kernel_with(varying=("rows",))
def weight_only_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    codes_stride: tl.tensor,
    chunks_per_split: tl.tensor,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    NATIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Compute one tile of rows by one tile of outputs over one part of the inputs per program."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    split = tl.program_id(2)
    total = multiply_chunks(
        x_ptr + row.to(tl.int64) * inputs,
        row < rows,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        factors_ptr,
        codes_stride,
        output,
        outputs,
        inputs,
        split,
        chunks_per_split,
        KIND,
        GROUP,
        SCALES,
        OFFSETS,
        NATIVE,
        RAGGED,
        TALL,
        WIDE,
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(
        out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :]
    )


@kernel_with(varying=("count",))
def add_splits_kernel(
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    outputs: tl.tensor,
    SPLITS: tl.constexpr,
    CHOICES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Add the sums of all parts of the inputs, in order, and the bias.

    ``partial`` is ``[SPLITS, rows, CHOICES, outputs]`` float32, and ``count`` is rows * outputs. A row of the result is
    the sum over its choices, too.
    """
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    first = (place // outputs).to(tl.int64) * ((CHOICES - 1) * outputs) + place
    total = tl.zeros([SIZE], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        for split in tl.static_range(SPLITS):
            source = first + split * CHOICES * count.to(tl.int64) + choice * outputs
            total += tl.load(partial_ptr + source, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)
