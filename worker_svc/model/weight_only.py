"""Quantised weights in the forms of `kernels.weight_only` and `kernels.fp8_linear`, for a GPU.

The matrices of a model are allocated on the host and hold nothing where the checkpoint is quantised. `coded` converts
the codes of one matrix, or quantises the matrix, and moves the result to the device. So the device never holds the
whole model dequantised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from kernels import fp8_linear, gguf, weight_only
from kernels._dispatch import architecture, runs_on_triton
from kernels.fp8_linear import Fp8Weight
from kernels.weight_only import UNIT, Kind, Scales, WeightOnly, pack_four_bits, padded_inputs
from worker_svc.model.llama_layer import Codes
from worker_svc.model.quantised import Fp4Weight, GgufWeight, QuantisedWeight, StoredWeight, StoredWeights


def is_available(device: torch.device) -> bool:
    """Return whether products on this device can take quantised weights."""
    return runs_on_triton(torch.empty(0, device=device))


def multiplies_e4m3(device: torch.device) -> bool:
    """Return whether the device has products over e4m3."""
    return is_available(device) and architecture(torch.empty(0, device=device)) >= 89


def coded(matrix: torch.Tensor, stored: StoredWeights, quantization: str, device: torch.device) -> Codes:
    """Return the weights of a matrix `[outputs, inputs]`, on the device.

    Args:
        matrix: on the host; it holds nothing where `stored` has its weights.
        stored: weights of the checkpoint; those of the matrix are removed.
        quantization: "int8", "int4" or "fp8" to quantise the matrix, or "none" to use the codes of the checkpoint.
        device: where the weights go.

    Returns: Weights whose outputs are those of the matrix, in order. Empty if the matrix is not quantised, or no form
        holds it; it then has all of its weights.
    """
    if quantization != "none":
        quantised = _quantised(matrix.to(device), quantization)
        return () if quantised is None else (quantised,)
    parts = stored.take(matrix)
    if not parts:
        return ()
    if multiplies_e4m3(device) and (fp8 := _as_fp8(parts)) is not None:
        stored.num_packed += len(parts)
        return (fp8.to(device),)
    found = [_coded(part) for part in parts]
    usable = [part for part in found if part is not None]
    if len(usable) < len(found):
        matrix.copy_(torch.cat([part.dequantised() for part in parts]))
        stored.num_dequantised += len(parts)
        return ()
    stored.num_packed += len(usable)
    alike = groupby(usable, _form)
    return tuple(_joined(list(each)).to(device) for _, each in alike)


def coded_experts(
    matrices: torch.Tensor, stored: StoredWeights, quantization: str, device: torch.device
) -> WeightOnly | Fp8Weight | None:
    """Return one layer of all experts, `[experts, outputs, inputs]`, on the device; arguments as for `coded`.

    Returns: None if the experts are not quantised, or no form holds all of them; the matrices then have all weights.
    """
    before = stored.num_packed
    found = [coded(matrix, stored, quantization, device) for matrix in matrices]
    alone = [codes[0] for codes in found if len(codes) == 1]
    in_e4m3 = [each for each in alone if isinstance(each, Fp8Weight)]
    weight_only_forms = [each for each in alone if isinstance(each, WeightOnly)]
    if len(weight_only_forms) == len(found) and (whole := weight_only.stack(weight_only_forms)) is not None:
        return whole
    if len(in_e4m3) == len(found) and (of_e4m3 := fp8_linear.stack(in_e4m3)) is not None:
        return of_e4m3
    if quantization == "none":  # Otherwise the matrices still have their weights.
        stored.num_dequantised += stored.num_packed - before
        stored.num_packed = before
        for matrix, codes in zip(matrices, found, strict=True):
            if codes:
                matrix.copy_(torch.cat([_dequantised(each) for each in codes]))
    return None


def _dequantised(weight: WeightOnly | Fp8Weight) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        return fp8_linear.dequantised(weight)
    return weight_only.dequantised(weight)


def _quantised(matrix: torch.Tensor, quantization: str) -> WeightOnly | Fp8Weight | None:
    """Quantise a matrix on its device; None if its sizes do not fit."""
    if quantization != "fp8":
        return weight_only.quantise_weight(matrix, Kind.INT4 if quantization == "int4" else Kind.INT8)
    if multiplies_e4m3(matrix.device) and (whole := fp8_linear.quantise_weight(matrix)) is not None:
        return whole
    return weight_only.quantise_weight(matrix, Kind.FP8)


def _as_fp8(parts: Sequence[StoredWeight]) -> Fp8Weight | None:
    """Concatenate the outputs of weights in e4m3, for products with activations in e4m3; None if they do not fit."""
    codes: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    blocks: set[tuple[int, int]] = set()
    for part in parts:
        if not isinstance(part, QuantisedWeight) or part.codes.dtype != torch.float8_e4m3fn:
            return None
        (outputs, inputs), (high, wide) = part.shape, part.block
        own = part.scales.float()
        if own.shape[1] == 1:  # Scales per output or tensor: one per output.
            own, high, wide = own.repeat_interleave(high, 0)[:outputs], 1, inputs
        if outputs % high:
            return None
        codes.append(part.codes.view(torch.uint8))
        scales.append(own)
        blocks.add((high, wide))
    if len(blocks) > 1:
        return None
    (block,) = blocks
    whole = Fp8Weight(torch.cat(codes), torch.cat(scales).contiguous(), block)
    return whole if fp8_linear.fits(whole.outputs, whole.codes.shape[1], block) else None


@dataclass(frozen=True, slots=True)
class _Coded:
    """A weight with one code per byte."""

    kind: Kind
    group: int
    codes: torch.Tensor
    """`[outputs, inputs]`."""
    scales: torch.Tensor
    """`[outputs, groups]`."""
    zeros: torch.Tensor | None = None
    """`[outputs, groups]` uint8 zero points, or float32 offsets that are subtracted from the scaled values."""
    scale_type: Scales = Scales.FLOAT
    factor: float | None = None
    """Factor of all weights."""


def _coded(weight: StoredWeight) -> _Coded | None:
    """Return the codes, scales and zero points of a weight; None if the kernels have no form for it."""
    if weight.shape[1] % UNIT:
        return None
    if isinstance(weight, GgufWeight):
        return _of_gguf(weight)
    if isinstance(weight, Fp4Weight):
        if weight.group not in (16, 32):
            return None
        factor = weight.factor if weight.scale_type is Scales.E4M3 else None
        return _Coded(Kind.FP4, weight.group, weight.unpacked(), weight.scales, None, weight.scale_type, factor)
    return _of_layout(weight)


def _of_gguf(weight: GgufWeight) -> _Coded | None:
    parts = gguf.read(weight.kind, weight.blocks)
    zeros = parts.group_offsets()
    scales = parts.scales if parts.factors is None else parts.group_scales()
    group = weight.shape[1] // scales.shape[1]
    if weight.kind in ("Q4_0", "Q4_K"):
        return _Coded(Kind.INT4, group, parts.codes, scales, zeros)
    if zeros is not None:
        return _Coded(Kind.INT8, group, parts.codes.to(torch.int8), scales, zeros)
    return _Coded(Kind.INT8, group, (parts.codes.short() - parts.zero).to(torch.int8), scales, None)


def _of_layout(weight: QuantisedWeight) -> _Coded | None:
    outputs, inputs = weight.shape
    high, wide = weight.block
    if weight.group_of is not None:
        return None
    groups = weight.scales.shape[1]
    if groups == 1:
        wide = inputs
    elif wide % 32 and wide != 16:
        return None

    def per_output(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(high, 0)[:outputs] if high > 1 else x

    scales = per_output(weight.scales)
    if weight.codes.dtype == torch.float8_e4m3fn:
        return _Coded(Kind.FP8, wide, weight.codes.view(torch.uint8), scales.float(), None)
    zeros = None if weight.zeros is None else per_output(weight.zeros)
    low, top = int(weight.codes.min()), int(weight.codes.max())
    has_zeros = zeros is not None and bool(zeros.any())
    if (low >= 0 and top <= 15) or (low >= -8 and top <= 7):
        shift = 8 if low < 0 or not has_zeros else 0
        codes = (weight.codes.short() + shift).byte()
        points = None if zeros is None else zeros + shift
        if int(codes.max()) <= 15:
            if points is None or bool((points == 8).all()):
                return _Coded(Kind.INT4, wide, codes, scales, None)
            if int(points.min()) >= 0:
                return _Coded(Kind.INT4, wide, codes, scales, points.byte())
    if has_zeros or weight.codes.dtype != torch.int8:
        return None
    return _Coded(Kind.INT8, wide, weight.codes, scales, None)


def _form(part: _Coded) -> tuple[object, ...]:
    """Return what weights have in common if `_joined` can concatenate them."""
    zeros = None if part.zeros is None else part.zeros.dtype
    return part.kind, part.group, zeros, part.scales.dtype, part.scale_type, part.factor is None


def _joined(parts: Sequence[_Coded]) -> WeightOnly:
    """Concatenate the outputs of weights with the same form."""
    first = parts[0]
    codes = torch.cat([part.codes for part in parts])
    zeros = [part.zeros for part in parts if part.zeros is not None]
    factors = [torch.full((len(part.codes),), part.factor) for part in parts if part.factor is not None]
    return WeightOnly(
        first.kind,
        codes.shape[1],
        first.group,
        pack_four_bits(codes) if first.kind.bits == 4 else padded_inputs(codes).contiguous(),
        torch.cat([part.scales for part in parts]).t().contiguous(),
        torch.cat(zeros).t().contiguous() if zeros else None,
        first.scale_type,
        torch.cat(factors) if factors else None,
    )
