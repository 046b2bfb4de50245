"""Eight-bit KV in kernels: the bits that torch gives, the values that torch reads."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels._triton import kernel, tl
from kernels.fp8 import dequantize, quantize
from kernels.gpu.fp8 import float_from_fp8, fp8_from_float
from kernels.kv_cache import write_kv
from kernels.kv_cache_reference import write_kv_reference
from kernels.kv_quantised import INT4, QUANTISED, cached_size, from_quantised
from tests.examples import examples


@kernel
def _round_trip_kernel(x_ptr: tl.tensor, bits_ptr: tl.tensor, back_ptr: tl.tensor, TILE: tl.constexpr) -> None:
    """One program: TILE values written in eight bits and read again."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bits = fp8_from_float(tl.load(x_ptr + place), False)
    tl.store(bits_ptr + place, bits)
    tl.store(back_ptr + place, float_from_fp8(bits, False))


def round_trip(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert to fp8 and back with the kernel; return the codes and the values."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % 256))
    bits, back = torch.empty(len(padded), dtype=torch.uint8), torch.empty(len(padded), dtype=torch.float16)
    _round_trip_kernel[(len(padded) // 256,)](padded, bits, back, TILE=256)
    return bits[: len(x)], back[: len(x)]


def test_every_code_is_read_exactly() -> None:
    """All 256 codes, subnormal ones and NaN included, have torch's value, and writing that value gives the code."""
    codes = torch.arange(256).to(torch.uint8)
    values = dequantize(codes, torch.float32)
    bits, back = round_trip(values)

    assert torch.equal(back.float().nan_to_num(777), values.nan_to_num(777))
    assert torch.equal(bits[~values.isnan()], codes[~values.isnan()])


def test_borders_round_to_even() -> None:
    """Halfway between two neighbours, a value is rounded to the even one; slightly off, to the nearer one."""
    values = dequantize(torch.arange(127).to(torch.uint8), torch.float32)
    middle = (values[1:] + values[:-1]) / 2
    for x in (middle, middle * (1 + 1e-6), middle * (1 - 1e-6), -middle):
        bits, _ = round_trip(x)
        assert torch.equal(bits, quantize(x))


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-4, 1e4))
def test_any_values_get_the_bits_of_torch(seed: int, spread: float) -> None:
    """Values of any size, too large and infinite ones included, get torch's bits."""
    x = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * spread
    x[:4] = torch.tensor([torch.inf, -torch.inf, 1e30, -0.0])
    bits, back = round_trip(x)

    assert torch.equal(bits, quantize(x))
    assert torch.equal(back, dequantize(bits, torch.float16))


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim"),
    [(dtype, *sizes) for dtype in QUANTISED for sizes in ((2, 64), (3, 96 if dtype == INT4 else 80))],
)
def test_write_kv(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Keys and values are written into a quantised cache as the reference writes them: codes and scales."""
    key, value = torch.randn(2, 4, num_heads, head_dim) * torch.tensor([1e-3, 1.0, 1e4])[:num_heads, None]
    value[2, 1] = 0
    slots = torch.tensor([17, -1, 0, 31])
    ours = torch.zeros(2, 2, num_heads, 16, cached_size(head_dim, dtype), dtype=dtype)
    expected = ours.clone()
    write_kv(key, value, ours[0], ours[1], slots)
    write_kv_reference(key, value, expected[0], expected[1], slots)

    assert torch.equal(ours, expected)
    read = from_quantised(ours[0])[slots[[0, 2, 3]] // 16, :, slots[[0, 2, 3]] % 16]
    written = key[[0, 2, 3]]
    most = written.abs().amax(-1, keepdim=True)
    share = {torch.int8: 1 / 253, torch.uint8: 1 / 27, INT4: 1 / 14.5}[dtype]
    assert bool(((read - written).abs() <= most * share).all())
