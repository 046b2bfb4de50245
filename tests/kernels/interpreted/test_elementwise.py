"""KV write, norm, rotary and activation kernels against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.activation import ClampedSwiglu, gated, gated_reference, silu_mul, silu_mul_reference
from kernels.kv_cache import write_kv
from kernels.kv_cache_reference import write_kv_reference
from kernels.norm import rms_norm, rms_norm_reference
from kernels.rotary import apply_rotary, apply_rotary_reference

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(2, 64, 16), (3, 80, 24)])
def test_write_kv(dtype: torch.dtype, heads: int, head_dim: int, block_size: int) -> None:
    """The kernel writes the cache that the reference writes, from strided views and around negative slots."""
    packed = torch.randn(4, 3 * heads, head_dim).to(dtype)
    key, value = packed[:, heads : 2 * heads], packed[:, 2 * heads :]
    slots = torch.tensor([3 * block_size - 1, -1, 0, block_size])
    ours = torch.zeros(2, 4, heads, block_size, head_dim, dtype=torch.float16)
    expected = ours.clone()
    write_kv(key, value, ours[0], ours[1], slots)
    write_kv_reference(key, value, expected[0], expected[1], slots)

    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 96), (2, 5, 64), (2, 2, 2, 16)])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], weight_offset: float, with_residual: bool) -> None:
    """The kernel rounds as the reference does, up to the order of its sum."""
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    eps = 2 * torch.finfo(dtype).eps
    if with_residual:
        normed, summed = rms_norm(x, weight, 1e-5, residual=residual, weight_offset=weight_offset)
        expected, expected_sum = rms_norm_reference(x, weight, 1e-5, residual=residual, weight_offset=weight_offset)
        assert torch.equal(summed, expected_sum)
    else:
        normed = rms_norm(x, weight, 1e-5, weight_offset=weight_offset)
        expected = rms_norm_reference(x, weight, 1e-5, weight_offset=weight_offset)
    torch.testing.assert_close(normed, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm_rounds_where_the_reference_does(weight_offset: float) -> None:
    """In 16 bits nearly every element is bit-equal: the order of the sum changes far less than rounding does."""
    x, weight = torch.randn(20, 96).half(), torch.randn(96).half()
    equal = rms_norm(x, weight, 1e-5, weight_offset=weight_offset) == rms_norm_reference(
        x, weight, 1e-5, weight_offset=weight_offset
    )

    assert int((~equal).sum()) <= 0.01 * equal.numel()


@pytest.mark.parametrize("leading", [(6,), (3, 2)])
def test_rms_norm_of_a_view(leading: tuple[int, ...]) -> None:
    """Vectors inside a packed projection are normed in place of it, and nothing else is read."""
    packed = torch.full((*leading, 3 * 32), torch.nan)
    view = packed[..., 32:64]
    view.normal_()
    weight = torch.randn(32)

    torch.testing.assert_close(rms_norm(view, weight, 1e-6), rms_norm_reference(view, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (80, 16)])
def test_rotary(dtype: torch.dtype, head_dim: int, half: int) -> None:
    """The kernel rotates like the reference: fully or partially, with many heads, and from views."""
    packed = torch.randn(3, 14, head_dim).to(dtype)
    query, key = packed[:, :9], packed[:, 9:12]
    angle = torch.randn(3, half)
    eps = 2 * torch.finfo(dtype).eps
    rotated = apply_rotary(query, key, angle.cos(), angle.sin())
    expected = apply_rotary_reference(query, key, angle.cos(), angle.sin())

    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    """The kernel equals the reference on widths beyond one tile."""
    gate_up = torch.randn(3, 2 * 1100).to(dtype) * 4
    eps = 4 * torch.finfo(dtype).eps

    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 260), (2, 4098)])
def test_clamped_swiglu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Gate and up alternate; values beyond the limit are clamped, and NaN stays."""
    clamped = ClampedSwiglu(1.702, 2.0)
    gate_up = (3 * torch.randn(shape)).to(dtype)
    gate_up[0, 0] = torch.nan

    expected = gated_reference(gate_up, clamped)
    torch.testing.assert_close(gated(gate_up, clamped), expected, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert bool(expected[0, 0].isnan())
