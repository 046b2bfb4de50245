"""RMSNorm against the modules of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.native.library import Native, native_levels
from kernels.native.norm import rms_norm_native
from kernels.norm import rms_norm, rms_norm_reference
from tests.kernels.rounding import assert_rounded_alike

LEVELS = pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
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


@LEVELS
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_rounding(kernels: Native, offset: float, dtype: torch.dtype) -> None:
    """Every level rounds like the reference, also for views and so many vectors that several threads compute."""
    x, weight = torch.randn(500, 2, 3, 80).to(dtype).transpose(1, 2), torch.randn(80).to(dtype)
    found = rms_norm_native(x, offset + weight.float(), 1e-5, rounds_twice=offset == 0.0, kernels=kernels)

    assert_rounded_alike(found, rms_norm_reference(x, weight, 1e-5, weight_offset=offset))
