"""Products of weights and activations in e4m3 against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_linear import Fp8Weight, dequantised, fits, fp8_linear, fp8_linear_reference


def drawn(outputs: int, inputs: int, block: tuple[int, int]) -> Fp8Weight:
    """Return random codes and scales."""
    high, wide = block
    codes = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn).view(torch.uint8)
    return Fp8Weight(codes, torch.rand(-(-outputs // high), -(-inputs // wide)) * 0.01 + 0.001, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block"), [(200, 384, (128, 128)), (72, 256, (1, 256)), (64, 256, (64, 128))]
)
def test_equals_its_reference(outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype) -> None:
    """Blocks of 128 x 128 and scales per output, for few and many rows, with and without a bias."""
    torch.manual_seed(0)
    weight, bias = drawn(outputs, inputs, block), torch.randn(outputs).to(dtype)
    assert fits(outputs, inputs, block)
    for rows in (1, 5, 17, 70):
        x = torch.randn(rows, inputs).to(dtype)
        for added in (None, bias):
            found = fp8_linear(x, weight, added)
            expected = fp8_linear_reference(x.double(), weight, added)

            size = x.double().abs() @ dequantised(weight).double().abs().t() + 1
            assert found.dtype == dtype
            # An activation in the middle between two codes may be rounded either way.
            near = (found.double() - expected).abs() <= (1e-6 if dtype == torch.float32 else 1e-3) * size
            assert float(near.double().mean()) > 0.95
            assert bool(((found.double() - expected).abs() <= 1e-2 * size).all())


def test_values_that_are_not_finite_stay_in_their_row() -> None:
    """A NaN or an infinity in a row makes that row's results not finite, and no other's."""
    weight = drawn(64, 256, (128, 128))
    x = torch.randn(4, 256)
    x[1, 3], x[2, 255] = torch.nan, torch.inf

    assert fp8_linear(x, weight).isfinite().all(1).tolist() == [True, False, False, True]


def test_rounding_activations_costs_little() -> None:
    """On normal weights and activations, the result is near that of unrounded activations."""
    torch.manual_seed(0)
    weight, x = drawn(128, 512, (128, 128)), torch.randn(16, 512)
    exact = x.double() @ dequantised(weight).double().t()

    assert float((fp8_linear(x, weight).double() - exact).norm() / exact.norm()) < 0.04
