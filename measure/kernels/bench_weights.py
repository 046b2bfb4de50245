"""Products with quantised weights on the current device, compared with torch's product in the model's data type.

The bytes of a measurement are those of the codes and scales, and the operations those of the product. On a CPU the same
code measures the references, which only tests the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from kernels import fp8_linear
from kernels.experts import ExpertLayers, ExpertWeights, mix_experts
from kernels.fp8_linear import Fp8Weight
from kernels.weight_only import Kind, Scales, WeightOnly, pack_four_bits, quantise_weight, weight_only_linear
from measure.kernels.bench import Measurement, Sizes, median_seconds

_ROWS = (1, 16, 64, 512, 4096)
_EXPERTS, _TOP_K = 32, 4
"""As in gpt-oss-20b."""
_EXPERT_TOKENS = (1, 64, 2048)
FORMS = ("int4", "mxfp4", "nvfp4", "int8", "fp8 by output", "fp8 in blocks")


def measurements(
    device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    """Yield each measurement's name with the function that runs it."""
    small = device.type == "cpu"
    for form in FORMS:
        for rows in _ROWS[:2] if small else _ROWS:
            name = f"{form} weights, {rows} rows of {sizes.intermediate}x{sizes.hidden}"
            yield name, partial(_product, name, form, device, dtype, sizes, rows)
    count, side = (4, 128) if small else (_EXPERTS, 2816)
    for form in ("mxfp4", "int4", "fp8 in blocks"):
        for tokens in _EXPERT_TOKENS[:2] if small else _EXPERT_TOKENS:
            name = f"experts in {form}, {_TOP_K} of {count} of {side}x{side}, {tokens} tokens"
            yield name, partial(_mixture, name, form, device, dtype, count, side, tokens)


def drawn(form: str, outputs: int, inputs: int, device: torch.device) -> WeightOnly | Fp8Weight:
    """Return random weights in a form."""
    weight = torch.randn(outputs, inputs, device=device)
    if form in ("int4", "int8"):
        found: WeightOnly | Fp8Weight | None = quantise_weight(weight, Kind.INT4 if form == "int4" else Kind.INT8)
        assert found is not None
        return found
    if form.startswith("fp8"):
        found = fp8_linear.quantise_weight(weight)
        assert found is not None
        if form == "fp8 by output":
            return found
        scales = torch.rand(-(-outputs // 128), inputs // 128, device=device) + 0.5
        return Fp8Weight(found.codes, scales, (128, 128))
    codes = pack_four_bits(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device))
    group, scale_type = (32, Scales.E8M0) if form == "mxfp4" else (16, Scales.E4M3)
    low, high = (118, 124) if scale_type is Scales.E8M0 else (40, 60)
    scales = torch.randint(low, high, (inputs // group, outputs), dtype=torch.uint8, device=device)
    factors = torch.ones(outputs, device=device) if scale_type is Scales.E4M3 else None
    return WeightOnly(Kind.FP4, inputs, group, codes, scales, None, scale_type, factors)


def drawn_experts(form: str, count: int, outputs: int, inputs: int, device: torch.device) -> WeightOnly | Fp8Weight:
    """Return random weights of experts in a form; all experts are equal but separate in memory."""
    one = drawn(form, outputs, inputs, device)
    if isinstance(one, Fp8Weight):
        return Fp8Weight(one.codes.repeat(count, 1, 1), one.scales.repeat(count, 1, 1), one.block)
    zeros = None if one.zeros is None else one.zeros.repeat(count, 1, 1)
    factors = None if one.factors is None else one.factors.repeat(count, 1)
    codes, scales = one.codes.repeat(count, 1, 1), one.scales.repeat(count, 1, 1)
    return WeightOnly(one.kind, inputs, one.group, codes, scales, zeros, one.scale_type, factors)


def nbytes(weight: ExpertWeights) -> int:
    """Return the bytes of weights."""
    return weight.codes.nbytes + weight.scales.nbytes if isinstance(weight, Fp8Weight) else weight.nbytes


def _product(name: str, form: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, rows: int) -> Measurement:
    weight = drawn(form, sizes.intermediate, sizes.hidden, device)
    x = torch.randn(rows, sizes.hidden, device=device).to(dtype)
    if isinstance(weight, Fp8Weight):
        seconds = median_seconds(partial(fp8_linear.fp8_linear, x, weight), device)
    else:
        seconds = median_seconds(partial(weight_only_linear, x, weight), device)
    plain = torch.randn(sizes.intermediate, sizes.hidden, device=device).to(dtype)
    peer_s = median_seconds(partial(linear, x, plain), device)
    moved = nbytes(weight) + rows * (sizes.hidden + sizes.intermediate) * dtype.itemsize
    return Measurement(
        name, seconds, moved, 2 * rows * sizes.hidden * sizes.intermediate, f"torch, {dtype}".lower(), peer_s
    )


def _mixture(
    name: str, form: str, device: torch.device, dtype: torch.dtype, count: int, side: int, tokens: int
) -> Measurement:
    layers = ExpertLayers(
        drawn_experts(form, count, 2 * side, side, device), drawn_experts(form, count, side, side, device)
    )
    x, logits = torch.randn(tokens, side, device=device).to(dtype), torch.randn(tokens, count, device=device)
    compute = partial(mix_experts, x, logits, top_k=_TOP_K, renormalise=True)
    seconds = median_seconds(partial(compute, layers), device)
    plain = ExpertLayers(
        torch.randn(count, 2 * side, side, device=device, dtype=dtype),
        torch.randn(count, side, side, device=device, dtype=dtype),
    )
    peer_s = median_seconds(partial(compute, plain), device)
    read = (nbytes(layers.gate_up) + nbytes(layers.down)) * min(1.0, tokens * _TOP_K / count)
    return Measurement(name, seconds, read, 6 * tokens * _TOP_K * side * side, "own kernel, unquantised", peer_s)
