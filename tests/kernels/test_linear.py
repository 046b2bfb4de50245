"""Products over packed weights at every level of the CPU kernels, against float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear import (
    PackedLinear,
    dequantised,
    empty_weight,
    linear_reference,
    pack,
    quantise,
    quantise_int4,
    quantised_linear_reference,
)
from kernels.native.library import Native, native_levels

LEVELS = native_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason="built without a compiler: torch computes")


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Return packed weights."""
    destination = empty_weight(weight.shape[0], weight.shape[1], weight.dtype)
    destination.copy_(weight)
    return pack(destination, bias, kernels=LEVELS[0])


def quantised(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Return packed weights in int8."""
    return quantise(weight, bias, kernels=LEVELS[0])


def quantised_int4(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Return packed weights in int4."""
    return quantise_int4(weight, bias, kernels=LEVELS[0])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a result."""
    return float((got.double() - expected).abs().amax() / expected.abs().amax())


@given(data=st.data())
def test_products_equal_the_reference_for_any_shape(data: st.DataObject) -> None:
    """Any rows, inputs, outputs, dtype and level give the product within the rounding of the operands."""
    kernels: Native = data.draw(st.sampled_from(LEVELS), label="level")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype")
    rows, inputs, outputs = (data.draw(st.integers(1, most), label="size") for most in (40, 150, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if data.draw(st.booleans(), label="bias") else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)

    got = packed(weight, bias)(x, kernels)

    # Relative to the sum of absolute products, because products with different signs may cancel to nearly zero.
    error = (got.double() - linear_reference(x.double(), weight, bias)).abs()
    size = linear_reference(x.double().abs(), weight.abs(), None if bias is None else bias.abs())
    assert got.dtype == dtype
    assert bool((error <= (1e-5 if dtype == torch.float32 else 1e-2) * size).all())


@given(data=st.data())
def test_int8_products_equal_the_reference_for_any_shape(data: st.DataObject) -> None:
    """Rounded weights times rounded activations, summed exactly."""
    kernels: Native = data.draw(st.sampled_from(LEVELS), label="level")
    rows, inputs, outputs = (data.draw(st.integers(1, most), label="size") for most in (40, 150, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if data.draw(st.booleans(), label="bias") else None

    got = quantised(weight, bias)(x, kernels)

    # A value halfway between two integers may be rounded either way, which changes one product by one unit.
    assert relative_error(got, quantised_linear_reference(x.double(), weight, bias)) < 2e-2


@given(data=st.data())
def test_int4_products_equal_the_reference_for_any_shape(data: st.DataObject) -> None:
    """Dequantised weights times rounded activations in float64; every level gives the same bits."""
    rows, inputs, outputs = (data.draw(st.integers(1, most), label="size") for most in (40, 200, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if data.draw(st.booleans(), label="bias") else None
    linear = quantised_int4(weight, bias)

    first, *others = (linear(x, kernels) for kernels in LEVELS)

    assert all(torch.equal(first, other) for other in others)
    top = x.abs().amax(-1, keepdim=True)
    scaled, unit = x * (127 / top), top / 127
    rounded = scaled.round() * unit
    exact = linear_reference(rounded.double(), dequantised(linear), bias)
    size = linear_reference(rounded.double().abs(), dequantised(linear).abs(), None if bias is None else bias.abs())
    # A value halfway between two integers may be rounded either way.
    is_middle = (scaled.frac().abs() - 0.5).abs() < 1e-4
    either = linear_reference((is_middle * unit).double(), dequantised(linear).abs(), None)
    assert bool(((first.double() - exact).abs() <= 1e-5 * size + either).all())


@given(data=st.data())
def test_int4_weights_are_the_nearest_of_their_group(data: st.DataObject) -> None:
    """A weight moves by at most half a step of its group. A step is a fifteenth of the group's range (including zero).

    The bound is a little larger, because a scale in bfloat16 may be smaller than the range requires.
    """
    inputs, outputs = data.draw(st.integers(1, 200), label="inputs"), data.draw(st.integers(1, 40), label="outputs")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    weight = torch.randn(outputs, inputs, generator=generator) + data.draw(st.sampled_from([0.0, 3.0, -0.5]))
    weight[0] = 0.0

    got = dequantised(quantised_int4(weight))

    groups = torch.nn.functional.pad(weight, (0, -inputs % 64)).view(outputs, -1, 64)
    step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    bound = step.repeat_interleave(64, 1)[:, :inputs] * (0.5 + 15 / 256)
    assert bool(((got - weight).abs() <= bound).all())


def test_int4_zero_points_keep_more_of_the_weights() -> None:
    """Groups with a zero point are nearer to normal weights than groups with the zero point 8."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    groups = weight.view(64, -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / 8
    symmetric = (groups / scale).round().clamp(-8, 7) * scale

    error = float((dequantised(quantised_int4(weight)) - weight).norm())

    assert error < float((symmetric - groups).norm())
    assert error < 0.1 * float(weight.norm())


@pytest.mark.parametrize("kernels", LEVELS, ids=lambda kernels: kernels.level_name)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: Native) -> None:
    """Bit for bit the same alone and in any batch."""
    for linear in (
        packed(torch.randn(120, 96)),
        packed(torch.randn(120, 96).bfloat16()),
        quantised(torch.randn(50, 96)),
        quantised_int4(torch.randn(50, 96)),
    ):
        x = torch.randn(33, 96)
        together = linear(x, kernels)
        for rows in (1, 2, 5, 16):
            assert torch.equal(linear(x[:rows], kernels), together[:rows])


@pytest.mark.parametrize("kernels", LEVELS, ids=lambda kernels: kernels.level_name)
def test_values_that_are_not_finite_stay_in_their_row(kernels: Native) -> None:
    """A NaN or an infinity in a row's activations makes that row's results not finite, and no other's."""
    for linear in (
        packed(torch.randn(40, 96)),
        packed(torch.randn(40, 96).bfloat16()),
        quantised(torch.randn(40, 96)),
        quantised_int4(torch.randn(40, 96)),
    ):
        x = torch.randn(4, 96)
        x[1, 3], x[2, 95] = torch.nan, torch.inf
        finite = linear(x, kernels).isfinite().all(1)

        assert finite.tolist() == [True, False, False, True]


def test_int8_keeps_most_of_the_answer() -> None:
    """On normal weights and activations int8 costs less than 2 % of the result's size."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(512, 1024, generator=generator), torch.randn(16, 1024, generator=generator)
    expected = linear_reference(x.double(), weight)

    assert float((quantised(weight)(x, LEVELS[-1]).double() - expected).norm() / expected.norm()) < 0.02


_KEPT = """
import psutil, torch
from kernels.linear import empty_weight, pack
from kernels.native.library import native_levels

kernels = native_levels()[0]
process = psutil.Process()


def kept(rows, inputs, outputs):
    linear = pack(empty_weight(outputs, inputs, torch.float32).zero_(), None, kernels=kernels)
    x = torch.zeros(rows, inputs)
    linear(x[:1], kernels)
    before = process.memory_info().rss
    linear(x, kernels)
    return process.memory_info().rss - before


print(kept(64, 64, 262_144), kept(2048, 8192, 16))
"""


def test_work_memory_depends_on_the_inputs_only() -> None:
    """After a product, a thread keeps at most its operands' rows: no memory for outputs, such as a large vocabulary."""
    done = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True)
    for_vocabulary, for_inputs = map(int, done.stdout.split())

    assert for_vocabulary < 16 << 20, "the outputs have 64 MiB"
    assert 2048 * 8192 * 4 / 2 < for_inputs < 2048 * (8192 + 64) * 4 + (16 << 20)
