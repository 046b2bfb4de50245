"""RMSNorm against the modules of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.norm import rms_norm
from tests.kernels.rounding import assert_rounded_alike

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 64)])
def test_llama_rounding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Without a weight offset the result is LlamaRMSNorm's, for any leading shape."""
    module = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    module.weight.data.normal_()
    x = torch.randn(shape).to(dtype)

    assert_rounded_alike(rms_norm(x, module.weight, 1e-5), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rounding(dtype: torch.dtype) -> None:
    """With weight offset 1 the result is Gemma2RMSNorm's."""
    module = Gemma2RMSNorm(96, eps=1e-6).to(dtype)
    module.weight.data.normal_()
    x = torch.randn(5, 96).to(dtype)

    assert_rounded_alike(rms_norm(x, module.weight, 1e-6, weight_offset=1.0), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_is_added_before_the_norm(dtype: torch.dtype) -> None:
    """With a residual both the rounded sum and its norm are returned, and the inputs stay as they were."""
    module = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    x, residual = torch.randn(2, 5, 64).to(dtype)
    x_before, residual_before = x.clone(), residual.clone()
    normed, summed = rms_norm(x, module.weight, 1e-5, residual=residual)

    assert torch.equal(summed, x_before + residual_before)
    assert_rounded_alike(normed, module(x_before + residual_before))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_float64_is_computed_in_float64() -> None:
    """A float64 input is normalised without passing through float32."""
    x, weight = torch.randn(4, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=1e-14, atol=1e-14)
