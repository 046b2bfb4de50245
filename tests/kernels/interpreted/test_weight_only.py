"""Products with weights that stay quantised, against the products with dequantised weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.weight_only import (
    Kind,
    Scales,
    WeightOnly,
    dequantised,
    pack_four_bits,
    padded_inputs,
    quantise_weight,
    weight_only_linear,
)
from tests.examples import examples

CASES = [
    *((Kind.INT4, group, zeros) for group in (32, 64, 128, 0) for zeros in (False, True)),
    *((Kind.FP4, group, False) for group in (16, 32)),
    *((Kind.INT8, group, False) for group in (32, 0)),
    *((Kind.FP8, group, False) for group in (128, 0)),
]
"""Kinds, groups (0: all inputs) and whether groups have zero points."""


def drawn(
    kind: Kind, outputs: int, inputs: int, group: int, *, zeros: bool, scale_type: Scales = Scales.FLOAT
) -> WeightOnly:
    """Return random codes and scales; with scales in e4m3 also factors of the outputs."""
    group = group or inputs
    groups = -(-inputs // group)
    scales = torch.rand(groups, outputs) * 0.02 + 0.01
    factors = None
    if scale_type is Scales.E8M0:
        scales = torch.randint(118, 124, (groups, outputs), dtype=torch.uint8)
    elif scale_type is Scales.E4M3:
        scales = torch.randint(40, 60, (groups, outputs), dtype=torch.uint8)
        factors = torch.rand(outputs) * 0.01 + 0.01
    if kind.bits == 4:
        codes = pack_four_bits(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8))
    elif kind is Kind.FP8:
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    points = torch.randint(0, 16, (groups, outputs), dtype=torch.uint8) if zeros else None
    codes = codes if kind.bits == 4 else padded_inputs(codes).contiguous()
    return WeightOnly(kind, inputs, group, codes, scales, points, scale_type, factors)


@settings(max_examples=examples(16), deadline=None)
@given(data=st.data())
def test_equals_its_reference(data: st.DataObject) -> None:
    """Any kind, rows and outputs; a tile or several, and inputs that are divided among programs or not.

    Inputs may end in the middle of a chunk, and scales may have 8 bits.
    """
    kind, group, zeros = data.draw(st.sampled_from(CASES))
    rows, outputs = data.draw(st.sampled_from([1, 3, 16, 17, 70])), data.draw(st.sampled_from([16, 64, 100]))
    inputs = data.draw(st.sampled_from([128, 640, 96, 352] if group <= 32 else [128, 640]))
    scale_type = data.draw(st.sampled_from(Scales)) if kind is Kind.FP4 else Scales.FLOAT
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    weight = drawn(kind, outputs, inputs, group, zeros=zeros, scale_type=scale_type)
    x = torch.randn(rows, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if data.draw(st.booleans()) else None

    ours = weight_only_linear(x, weight, bias)

    exact = torch.nn.functional.linear(
        x.double(), dequantised(weight).double(), None if bias is None else bias.double()
    )
    size = x.double().abs() @ dequantised(weight).double().abs().t() + 1
    assert ours.dtype == dtype
    assert bool(((ours.double() - exact).abs() <= (1e-5 if dtype == torch.float32 else 2e-3) * size).all())


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Up to 16 rows, and above, a row is bit for bit the same in any batch."""
    torch.manual_seed(0)
    weight = drawn(Kind.INT4, 64, 640, 64, zeros=True)
    x = torch.randn(40, 640).half()
    for most, parts in ((16, (1, 5)), (40, (17, 33))):
        together = weight_only_linear(x[:most], weight)
        for rows in parts:
            assert torch.equal(weight_only_linear(x[:rows], weight), together[:rows])


@pytest.mark.parametrize(("kind", "bound"), [(Kind.INT8, 0.01), (Kind.FP8, 0.04), (Kind.INT4, 0.12)])
def test_quantised_weights_are_near(kind: Kind, bound: float) -> None:
    """`quantise_weight` moves normal weights by a step of their group at most."""
    for inputs in (256, 96):
        weight = torch.randn(64, inputs)
        found = quantise_weight(weight, kind)

        assert found is not None
        assert float((dequantised(found) - weight).norm() / weight.norm()) < bound
    assert quantise_weight(torch.randn(8, 100), kind) is None
