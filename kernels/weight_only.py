"""``y = x Wᵀ + b`` on a GPU with weights that stay quantised: W4A16 and W8A16.

A weight is ``(value(code) - zero) * scale``, or ``value(code) * scale - offset``. A group of consecutive inputs of an
output shares these numbers. Activations keep their type; weights are dequantised in registers, rounded to the type of
the activations, and multiplied by the tensor cores. So the result is that of the dequantised weights, up to the order
of the sum.

    kind    code                                 used for
    int4    0 to 15                              GPTQ, AWQ, compressed-tensors, GGUF Q4_0, `--quantization int4`
    fp4     e2m1                                 MXFP4 (gpt-oss), NVFP4
    int8    -128 to 127                          compressed-tensors, GPTQ, GGUF Q8_0, `--quantization int8`
    fp8     e4m3                                 FP8 on GPUs without products over e4m3

Scales are floating-point numbers, or bytes as in the checkpoint: powers of two (e8m0, MXFP4), or e4m3 (NVFP4). With
NVFP4, each output also has a factor for its sum, because one global scale belongs to a tensor of the checkpoint.

Four-bit codes are packed along the inputs: in a chunk of 64 inputs, byte j has the code of input j in its lower half
and that of input j + 32 in its upper half. A program thus reads two tiles of 32 adjacent activations per chunk, and no
register is shuffled.

For few rows, the inputs are divided among several programs (split-K), whose partial sums are added in order. For many
rows, a program computes a large tile. The split depends on the sizes and on whether there are at most 16 rows, so a
row's result does not depend on the other rows within either range.

The weights of a mixture of experts have one more dimension in front; `kernels.experts` multiplies with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch.nn.functional import linear, pad

from kernels._dispatch import architecture, num_multiprocessors, runs_on_triton

CHUNK = 64
"""Inputs of a chunk of four-bit codes."""
UNIT = 32
"""The inputs of a matrix are a multiple of this; the codes are padded to whole chunks."""
FEW_ROWS = 16
"""Up to this number of rows, a tile has 16 rows."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Kind(IntEnum):
    """How a code stands for a value; the kernels' parameter has the same numbers."""

    INT4 = 0
    FP4 = 1
    INT8 = 2
    FP8 = 3

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (Kind.INT4, Kind.FP4) else 8


class Scales(IntEnum):
    """How scales are stored; the kernels' parameter has the same numbers."""

    FLOAT = 0
    E8M0 = 1
    """A byte b, which is 2^(b - 127)."""
    E4M3 = 2


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """Quantised weights of a linear layer, or of one layer of all experts of a mixture.

    The tensors of experts have the expert as additional first dimension.
    """

    kind: Kind
    inputs: int
    """Inputs of the layer, a multiple of 32; the codes are padded to a multiple of 64."""
    group: int
    """Inputs that share a scale: 16, or a multiple of 32."""
    codes: torch.Tensor
    """``[outputs, inputs / 2]`` uint8, or ``[outputs, inputs]`` int8 or uint8 (e4m3)."""
    scales: torch.Tensor
    """``[groups, outputs]`` float32, bfloat16 or float16; uint8 unless ``scale_type`` is FLOAT."""
    zeros: torch.Tensor | None = None
    """``[groups, outputs]`` uint8 zero points of INT4, or float32 offsets that are subtracted from the scaled values;
    None: zero points of 8 for INT4, and nothing for other kinds."""
    scale_type: Scales = Scales.FLOAT
    factors: torch.Tensor | None = None
    """``[outputs]`` float32: factor of each output's sum; None: 1."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device) -> WeightOnly:
        """Return the weights on a device."""
        return self._with({name: tensor.to(device) for name, tensor in self._tensors().items()})

    def expert(self, number: int) -> WeightOnly:
        """Return the weights of one expert."""
        return self._with({name: tensor[number] for name, tensor in self._tensors().items()})

    def _with(self, tensors: dict[str, Any]) -> WeightOnly:
        return replace(self, **tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def stack(weights: Sequence[WeightOnly]) -> WeightOnly | None:
    """Return the weights of all experts as one; None if their kinds, groups or zero points differ."""
    first = weights[0]

    def form(each: WeightOnly) -> object:
        types = {name: (tensor.dtype, tensor.shape) for name, tensor in each._tensors().items()}
        return each.kind, each.inputs, each.group, each.scale_type, types

    if any(form(each) != form(first) for each in weights):
        return None
    tensors = [each._tensors() for each in weights]
    return first._with({name: torch.stack([each[name] for each in tensors]) for name in tensors[0]})


def weight_only_linear(x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply ``x`` ``[..., inputs]`` (bfloat16, float16 or float32); return ``[..., outputs]`` in the same type."""
    if not runs_on_triton(x):
        return weight_only_linear_reference(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _launch(rows, weight, bias).view(*x.shape[:-1], weight.outputs)


def weight_only_linear_reference(x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch form of `weight_only_linear`; also the CPU path."""
    return linear(x, dequantised(weight, x.dtype), None if bias is None else bias.to(x.dtype))


def dequantised(weight: WeightOnly, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weights ``[outputs, inputs]``, computed in float32 and rounded to ``dtype``."""
    codes = weight.codes
    if weight.kind.bits == 4:
        halves = codes.view(len(codes), -1, 1, CHUNK // 2)
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    if weight.kind is Kind.FP4:
        values = e2m1_values(codes)
    elif weight.kind is Kind.FP8:
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        values = codes.float()
    zeros = None if weight.zeros is None else _spread(weight.zeros, weight.group, codes.shape[1])
    has_offsets = weight.zeros is not None and weight.zeros.is_floating_point()
    if weight.kind is Kind.INT4 and not has_offsets:
        values = values - (8 if zeros is None else zeros)
    values = values * _spread(scale_values(weight.scales, weight.scale_type), weight.group, codes.shape[1])
    if has_offsets and zeros is not None:
        values = values - zeros
    if weight.factors is not None:
        values = values * weight.factors[:, None]
    return values[:, : weight.inputs].to(dtype)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of e2m1 codes, one per byte, in float32."""
    return torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)[codes.long()]


def scale_values(scales: torch.Tensor, scale_type: Scales) -> torch.Tensor:
    """Return the numbers that stored scales represent."""
    if scale_type is Scales.E8M0:
        return (scales.int() << 23).view(torch.float32)
    return scales.view(torch.float8_e4m3fn) if scale_type is Scales.E4M3 else scales


def _spread(x: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """Return numbers of groups ``[groups, outputs]`` for all inputs, ``[outputs, inputs]`` float32; padding is 0."""
    spread = x.float().t().repeat_interleave(group, 1)[:, :inputs]
    return pad(spread, (0, inputs - spread.shape[1]))


def pack_four_bits(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes ``[outputs, inputs]`` uint8 from 0 to 15; return ``[outputs, inputs / 2]``, padded to whole chunks."""
    halves = padded_inputs(codes).reshape(len(codes), -1, 2, CHUNK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def quantise_weight(weight: torch.Tensor, kind: Kind, group: int = CHUNK) -> WeightOnly | None:
    """Quantise weights ``[outputs, inputs]`` as `--quantization` does; None if the sizes do not fit.

    INT8 and FP8 have one scale per output. INT4 has a scale and a zero point per group of inputs, as `kernels.linear`.
    """
    inputs = weight.shape[1]
    if inputs % UNIT:
        return None
    wide = weight.float()
    if kind in (Kind.INT8, Kind.FP8):
        scales = wide.abs().amax(1, keepdim=True) / (127 if kind is Kind.INT8 else 448)
        scaled = torch.where(scales > 0, wide / scales, 0)
        codes = scaled.round().to(torch.int8) if kind is Kind.INT8 else scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return WeightOnly(kind, inputs, inputs, padded_inputs(codes).contiguous(), scales.t().contiguous())
    groups = padded_inputs(wide).view(len(wide), -1, group)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).bfloat16().float()
    inverse = torch.where(scales > 0, 1 / scales, 0)
    zeros = (-low * inverse).round().clamp(0, 15)
    codes = ((groups * inverse[..., None]).round() + zeros[..., None]).clamp(0, 15).byte().flatten(1)
    return WeightOnly(
        kind, inputs, group, pack_four_bits(codes), scales.t().contiguous().bfloat16(), zeros.t().byte().contiguous()
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Sizes of a launch."""

    tall: int
    wide: int
    splits: int
    num_warps: int
    num_stages: int


def num_splits(x: torch.Tensor, programs: int, chunks: int) -> int:
    """Return the number of parts of the inputs: two programs per multiprocessor, each with at least four chunks."""
    return max(1, min(2 * num_multiprocessors(x) // programs, chunks // 4, 16))


def tile_outputs(x: torch.Tensor) -> int:
    """Return the outputs of a large tile.

    Matrix units of compute capability 9 and 10 read weights from shared memory. Others need registers for them.
    """
    return 128 if architecture(x) // 10 in (9, 10) else 64


def _tiles(x: torch.Tensor, weight: WeightOnly) -> _Tiles:
    rows = x.shape[0]
    chunks = -(-weight.inputs // CHUNK)
    if rows <= FEW_ROWS:
        wide = 64
        return _Tiles(16, wide, num_splits(x, -(-weight.outputs // wide), chunks), 4, 4)
    if x.dtype == torch.float32:
        return _Tiles(32, 64, 1, 4, 2)
    wide = tile_outputs(x)
    return _Tiles(64, wide, 1, 4, 3) if rows <= 64 else _Tiles(128, wide, 1, 8, 3)


def _launch(x: torch.Tensor, weight: WeightOnly, bias: torch.Tensor | None) -> torch.Tensor:
    from kernels.gpu.weight_only import weight_only_kernel

    rows, outputs = x.shape[0], weight.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tiles = _tiles(x, weight)
    chunks = -(-weight.inputs // CHUNK)
    per_split = -(-chunks // tiles.splits)
    splits = -(-chunks // per_split)
    partial = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    grid = (-(-rows // tiles.tall), -(-outputs // tiles.wide), splits)
    weight_only_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.factors,
        bias if splits == 1 else None,
        partial,
        rows,
        outputs,
        weight.inputs,
        weight.codes.stride(0),
        per_split,
        **kernel_options(weight, x),
        TALL=tiles.tall,
        WIDE=tiles.wide,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        add_splits(partial, bias, out)
    return out


def add_splits(partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, choices: int = 1) -> None:
    """Write the sums of the parts ``[splits, rows * choices, outputs]`` float32 and the bias to ``[rows, outputs]``.

    The choices of a row are added up, too.
    """
    from kernels.gpu.weight_only import add_splits_kernel

    count = out.numel()
    add_splits_kernel[(-(-count // 1024),)](
        partial,
        bias,
        out,
        count,
        out.shape[1],
        SPLITS=partial.shape[0],
        CHOICES=choices,
        SIZE=1024,
        num_warps=4,
    )


def kernel_options(weight: WeightOnly, x: torch.Tensor) -> dict[str, int]:
    """Return the kernels' compile-time parameters that describe the weights."""
    has_offsets = weight.zeros is not None and weight.zeros.is_floating_point()
    return {
        "KIND": int(weight.kind),
        "GROUP": weight.group if weight.scales.shape[-2] > 1 or has_offsets else 0,
        "SCALES": int(weight.scale_type),
        "OFFSETS": has_offsets,
        "NATIVE": architecture(x) >= 89,
        "RAGGED": weight.inputs % CHUNK != 0,
    }


def padded_inputs(codes: torch.Tensor) -> torch.Tensor:
    """Return codes ``[outputs, inputs]`` padded with zeros to a whole number of chunks."""
    return pad(codes, (0, -codes.shape[1] % CHUNK))
