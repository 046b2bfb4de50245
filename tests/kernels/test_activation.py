"""The SwiGLU gate against the MLP of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from kernels.activation import silu_mul
from tests.kernels.rounding import assert_rounded_alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equals_the_gated_mlp_of_transformers(dtype: torch.dtype) -> None:
    """The first half is the gate and the second the factor; rounding is that of act_fn(gate) * up."""
    gate, up = torch.randn(2, 70, 48).to(dtype)

    assert_rounded_alike(silu_mul(torch.cat([gate, up], dim=-1)), ACT2FN["silu"](gate) * up)
