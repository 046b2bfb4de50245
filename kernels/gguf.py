"""Weights in the types of GGUF (llama.cpp), packed for the CPU kernels with their own codes and scales.

`pack` reorders the bytes of a matrix as `kernels/native/src/format.h` describes, and changes no number: the packed
weights are exactly those of the file. Activations are rounded to eight bits, as with int8 and int4 weights of
`kernels.linear`. `dequantised` is the torch reference: it returns the weights of a file as float32.

Q5_0 is held as Q8_0, which has all of its values.

    type   inputs of a block   bytes    bits per packed weight
    Q4_0           32            18              4.5
    Q5_0           32            22              8.5
    Q8_0           32            34              8.5
    Q4_K          256           144              4.625
    Q5_K          256           176              5.625
    Q6_K          256           210              6.625
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.linear import PackedLinear, advise_huge_pages
from kernels.native.structures import PARTS, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, CLinear

_LANES = 16
_LINE = 64


@dataclass(frozen=True, slots=True)
class GgufCodes:
    """Numbers of a matrix, without change."""

    codes: torch.Tensor
    """``[outputs, inputs]`` uint8 (Q8_0: int8), without the zero point."""
    scales: torch.Tensor
    """``[outputs, blocks]`` float16."""
    factors: torch.Tensor | None = None
    """``[outputs, groups]`` of the scales of groups, uint8 or int8; None: a group is a block."""
    offset_scales: torch.Tensor | None = None
    """As ``scales``."""
    offset_factors: torch.Tensor | None = None
    """As ``factors``."""
    zero: int = 0
    """Subtracted from each code."""

    def group_scales(self) -> torch.Tensor:
        """Return the scales of groups ``[outputs, groups]`` float32."""
        return _times(self.scales, self.factors)

    def group_offsets(self) -> torch.Tensor | None:
        """Return what is subtracted from the scaled values, ``[outputs, groups]`` float32; None: nothing."""
        return None if self.offset_scales is None else _times(self.offset_scales, self.offset_factors)


@dataclass(frozen=True, slots=True)
class _Type:
    format: int
    """Format of the packed weights."""
    block_inputs: int
    """In the file."""
    block_bytes: int
    scales_at: tuple[int, ...]
    """Places of the float16 numbers in a block."""
    read: Callable[[torch.Tensor], GgufCodes]
    """Splits the bytes ``[outputs, blocks, block_bytes]``."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of `BlockLayout` in format.h."""

    inputs: int
    header_lines: int
    group_inputs: int
    high_bits: int = 0
    whole_bytes: bool = False


_LAYOUTS = {
    Q4_0: _Layout(64, 1, 32),
    Q8_0: _Layout(64, 1, 32, whole_bytes=True),
    Q4_K: _Layout(256, 5, 32),
    Q5_K: _Layout(256, 5, 32, high_bits=1),
    Q6_K: _Layout(256, 5, 16, high_bits=2),
}


def block_inputs(kind: str) -> int:
    """Return the number of inputs in a block of the file."""
    return _TYPES[kind].block_inputs


def scales_at(kind: str) -> tuple[int, ...]:
    """Return the places of the float16 numbers in a block of the file, in bytes."""
    return _TYPES[kind].scales_at


def pack(kind: str, blocks: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Pack a matrix of a GGUF file.

    Args:
        kind: type of the matrix, such as "Q4_K"; one of `BLOCK_BYTES`.
        blocks: ``[outputs, blocks, bytes]`` uint8, as in the file.
        bias: ``[outputs]``.
    """
    found = _TYPES[kind]
    layout = _LAYOUTS[found.format]
    outputs, inputs = len(blocks), blocks.shape[1] * found.block_inputs
    rows, num_blocks = -(-outputs // _LANES), -(-inputs // layout.inputs)
    num_groups = layout.inputs // layout.group_inputs
    high_lines = 1 if layout.high_bits else 0
    low_lines = layout.group_inputs // (4 if layout.whole_bytes else 8)
    lines = layout.header_lines + num_groups * (high_lines + low_lines)
    packed = torch.empty(rows, num_blocks, lines, _LINE, dtype=torch.uint8)
    advise_huge_pages(packed)
    chunk = max(1, (1 << 24) // max(1, inputs * _LANES))  # rows of blocks at a time, for little temporary memory
    for first in range(0, rows, chunk):
        part = found.read(blocks[first * _LANES :][: chunk * _LANES])
        _fill(packed[first : first + chunk], part, layout)
    wide_bias = None if bias is None else bias.float().contiguous()
    structure = CLinear(
        found.format, 0, outputs, inputs, packed.data_ptr(), None if wide_bias is None else wide_bias.data_ptr()
    )
    return PackedLinear(structure, outputs, inputs, (packed,) if wide_bias is None else (packed, wide_bias))


def _fill(packed: torch.Tensor, part: GgufCodes, layout: _Layout) -> None:
    """Write packed blocks ``[rows, blocks, lines, 64]``."""
    rows, num_blocks = packed.shape[:2]
    num_groups = layout.inputs // layout.group_inputs
    missing = rows * _LANES - len(part.codes)

    def padded(x: torch.Tensor, width: int) -> torch.Tensor:
        """Return ``[rows, blocks, width, 16 outputs]``."""
        whole = torch.nn.functional.pad(x, (0, num_blocks * width - x.shape[1], 0, missing))
        return whole.view(rows, _LANES, num_blocks, width).permute(0, 2, 3, 1)

    def as_bytes(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous().view(torch.uint8).reshape(rows, num_blocks, -1)

    header = torch.zeros(rows, num_blocks, layout.header_lines * _LINE, dtype=torch.uint8)
    scales = as_bytes(padded(part.scales, num_groups if part.factors is None else 1))
    header[..., : scales.shape[-1]] = scales
    if part.factors is not None:
        factors = as_bytes(padded(part.factors, num_groups))
        header[..., _LINE : _LINE + factors.shape[-1]] = factors
    if part.offset_scales is not None and part.offset_factors is not None:
        header[..., 2 * _LANES : 4 * _LANES] = as_bytes(padded(part.offset_scales, 1))
        header[..., _LINE + num_groups * _LANES :] = as_bytes(padded(part.offset_factors, num_groups))
    packed[:, :, : layout.header_lines] = header.view(rows, num_blocks, layout.header_lines, _LINE)
    # [rows, blocks, groups, quads, 16 outputs, 4]
    quads = padded(part.codes, layout.inputs).view(rows, num_blocks, num_groups, -1, 4, _LANES).transpose(-1, -2)
    groups = packed[:, :, layout.header_lines :].view(rows, num_blocks, num_groups, -1, _LINE)
    if layout.whole_bytes:
        groups.copy_(quads.contiguous().view(torch.uint8).flatten(-2))
        return
    low = quads & 15
    high_lines = 1 if layout.high_bits else 0
    groups[..., high_lines:, :] = (low[:, :, :, 0::2] | low[:, :, :, 1::2] << 4).flatten(-2)
    if layout.high_bits:
        high = quads >> 4
        line = high[:, :, :, 0]
        for quad in range(1, quads.shape[3]):
            line = line | high[:, :, :, quad] << layout.high_bits * quad
        groups[..., 0, :] = line.flatten(-2)


def concatenated(parts: Sequence[PackedLinear]) -> PackedLinear:
    """Return a matrix with the outputs of several packed matrices of any of these types; they have the same inputs."""
    structures = (CLinear * len(parts))(*(CLinear.from_buffer_copy(part.structure) for part in parts))
    outputs, inputs = sum(part.outputs for part in parts), parts[0].inputs
    structure = CLinear(PARTS, len(parts), outputs, inputs, ctypes.addressof(structures))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return PackedLinear(structure, outputs, inputs, tensors, structures)


def read(kind: str, blocks: torch.Tensor) -> GgufCodes:
    """Split the bytes of a matrix of a GGUF file, ``[outputs, blocks, bytes]``."""
    return _TYPES[kind].read(blocks)


def dequantised(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Return the weights ``[outputs, inputs]`` of a matrix of a GGUF file in float32."""
    part = read(kind, blocks)
    scales, offsets = part.group_scales(), part.group_offsets()
    groups = (part.codes.view(*scales.shape, -1).float() - part.zero) * scales[..., None]
    return (groups if offsets is None else groups - offsets[..., None]).flatten(1)


def _times(of_blocks: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return the products of the numbers of blocks with the factors of their groups, in float32."""
    wide = of_blocks.float()
    return wide if factors is None else (wide[..., None] * factors.view(*wide.shape, -1).float()).flatten(1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _q4_0(blocks: torch.Tensor) -> GgufCodes:
    pairs = blocks[..., 2:]
    return GgufCodes(torch.cat((pairs & 15, pairs >> 4), -1).flatten(1), _half(blocks, 0), zero=8)


def _q5_0(blocks: torch.Tensor) -> GgufCodes:
    pairs = blocks[..., 6:]
    bits = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
    codes = torch.cat((pairs & 15, pairs >> 4), -1) | bits.flatten(-2) << 4
    return GgufCodes((codes.to(torch.int8) - 16).flatten(1), _half(blocks, 0))


def _q8_0(blocks: torch.Tensor) -> GgufCodes:
    return GgufCodes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight factors of scales and of offsets in the 12 bytes of a block of Q4_K or Q5_K."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)  # type: ignore[no-untyped-call]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    offsets = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales.flatten(1), offsets.flatten(1)


def _q4_k(blocks: torch.Tensor) -> GgufCodes:
    factors, offset_factors = _six_bits(blocks[..., 4:16])
    pairs = blocks[..., 16:].unflatten(-1, (4, 32))  # type: ignore[no-untyped-call]
    codes = torch.stack((pairs & 15, pairs >> 4), -2).flatten(1)
    return GgufCodes(codes, _half(blocks, 0), factors, _half(blocks, 2), offset_factors)


def _q5_k(blocks: torch.Tensor) -> GgufCodes:
    factors, offset_factors = _six_bits(blocks[..., 4:16])
    pairs = blocks[..., 48:].unflatten(-1, (4, 32))  # type: ignore[no-untyped-call]
    bits = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [..., 8 groups, 32]
    codes = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3, -2) | bits << 4
    return GgufCodes(codes.flatten(1), _half(blocks, 0), factors, _half(blocks, 2), offset_factors)


def _q6_k(blocks: torch.Tensor) -> GgufCodes:
    low = blocks[..., :128].unflatten(-1, (2, 64))  # type: ignore[no-untyped-call]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))  # type: ignore[no-untyped-call]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = torch.cat((low & 15, low >> 4), -1).unflatten(-1, (4, 32)) | (high >> shifts & 3) << 4  # type: ignore[no-untyped-call]
    factors = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return GgufCodes(codes.flatten(1), _half(blocks, 208), factors, zero=32)


_TYPES = {
    "Q4_0": _Type(Q4_0, 32, 18, (0,), _q4_0),
    "Q5_0": _Type(Q8_0, 32, 22, (0,), _q5_0),
    "Q8_0": _Type(Q8_0, 32, 34, (0,), _q8_0),
    "Q4_K": _Type(Q4_K, 256, 144, (0, 2), _q4_k),
    "Q5_K": _Type(Q5_K, 256, 176, (0, 2), _q5_k),
    "Q6_K": _Type(Q6_K, 256, 210, (208,), _q6_k),
}
BLOCK_BYTES = {kind: each.block_bytes for kind, each in _TYPES.items()}
"""Bytes of a block in a file, by the types that `pack` takes."""
