"""Products over the types of GGUF at every level of the CPU kernels, against the weights that `gguf` reads."""

from __future__ import annotations

import gguf as package
import numpy as np
import pytest
import torch

from kernels import gguf
from kernels.linear import PackedLinear, linear_reference
from kernels.native.library import Native, native_levels
from measure.testbed.quantised_checkpoints import gguf_blocks

LEVELS = native_levels()
KINDS = tuple(gguf.BLOCK_BYTES)
pytestmark = pytest.mark.skipif(not LEVELS, reason="built without a compiler: torch computes")


def drawn(kind: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a random matrix, and its weights as `gguf` reads them."""
    draw = np.random.default_rng(outputs)
    data = gguf_blocks(kind, draw.standard_normal((outputs, inputs), np.float32), draw)
    weights = package.quants.dequantize(data, package.GGMLQuantizationType[kind])
    return torch.from_numpy(data).view(outputs, -1, gguf.BLOCK_BYTES[kind]), torch.from_numpy(weights.copy())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return activations in eight bits, with a scale per row."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def sizes(kind: str) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs that fill the blocks of 16 outputs and 64 or 256 inputs, and that do not."""
    return ((64, 512), (85, 256), (33, 768)) if kind.endswith("K") else ((64, 512), (85, 96), (33, 288))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_weights_in_the_file(kind: str) -> None:
    """The reference has the weights that `gguf` reads; every level computes with them and gives the same bits."""
    for outputs, inputs in sizes(kind):
        blocks, weights = drawn(kind, outputs, inputs)
        torch.testing.assert_close(gguf.dequantised(kind, blocks), weights, rtol=3e-7, atol=1e-9)
        bias = torch.randn(outputs)
        linear = gguf.pack(kind, blocks, bias)
        for rows in (1, 2, 3, 4, 5, 7, 13):
            x = torch.randn(rows, inputs)
            first, *others = (linear(x, kernels) for kernels in LEVELS)

            assert all(torch.equal(first, other) for other in others)
            expected = linear_reference(rounded(x).double(), weights.double(), bias.double())
            size = linear_reference(rounded(x).abs().double(), weights.abs().double(), bias.abs().double())
            # An activation that lies in the middle between two integers may be rounded either way.
            unit = x.abs().amax(-1, keepdim=True) / 127
            is_middle = ((x / unit).frac().abs() - 0.5).abs() < 1e-4
            either = linear_reference((is_middle * unit).double(), weights.abs().double())
            assert bool(((first.double() - expected).abs() <= 1e-5 * size + either).all())


@pytest.mark.parametrize("kernels", LEVELS, ids=lambda kernels: kernels.level_name)
def test_a_matrix_may_have_several_types(kernels: Native) -> None:
    """Outputs in Q4_K, Q6_K and Q8_0, as in the projections of a file in Q4_K_M, are those of the parts."""
    parts = []
    for kind, outputs in (("Q4_K", 85), ("Q6_K", 16), ("Q8_0", 33)):
        blocks, _ = drawn(kind, outputs, 256)
        parts.append(gguf.pack(kind, blocks, torch.randn(outputs)))
    whole = gguf.concatenated(parts)

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 256).to(dtype)
        assert torch.equal(whole(x, kernels), torch.cat([part(x, kernels) for part in parts], 1))


@pytest.mark.parametrize("kernels", LEVELS, ids=lambda kernels: kernels.level_name)
def test_rows_do_not_depend_on_each_other(kernels: Native) -> None:
    """A row is bit for bit the same alone and in any batch, and only a row with a NaN or an infinity is not finite."""
    for kind in KINDS:
        linear: PackedLinear = gguf.pack(kind, drawn(kind, 50, 256)[0])
        x = torch.randn(19, 256)
        together = linear(x, kernels)
        for rows in (1, 2, 5, 16):
            assert torch.equal(linear(x[:rows], kernels), together[:rows])
        x[1, 3], x[2, 255] = torch.nan, torch.inf
        assert linear(x[:4], kernels).isfinite().all(1).tolist() == [True, False, False, True]


def test_packed_weights_take_little_more_than_the_file() -> None:
    """Bits per weight are those in the documentation of `kernels.gguf`."""
    found = {}
    for kind in KINDS:
        blocks, weights = drawn(kind, 256, 512)
        found[kind] = gguf.pack(kind, blocks).tensors[0].nbytes * 8 / weights.numel()

    assert found == {"Q4_0": 4.5, "Q5_0": 8.5, "Q8_0": 8.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.625}
