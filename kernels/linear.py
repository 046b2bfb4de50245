"""``y = x Wᵀ + b`` on a CPU, with weights that are packed once: float32, bfloat16, int8 or int4.

Packed weights consist of blocks of 16 outputs (`kernels/native/src/format.h`). float32 and bfloat16 are packed *in
place*, so that the model is not in memory twice: `empty_weight` allocates a weight with room for the padding, the
checkpoint is read into it, and `pack` converts it. `quantise` and `quantise_int4` make a separate copy.

With int8, all weights of one output share a scale, ``max |w| / 127``. One row's activations share a scale, which is
computed at run time. The integer product is exact. `quantised_linear_reference` defines the result in plain torch.

With int4, each group of 64 inputs of an output has a scale and a zero point: ``w = (q - zero) * scale`` with q from 0
to 15. The scale has 24 bits, which can represent every bfloat16 and float16 value. A weight therefore takes 4.5 bits.
Activations are quantised as for int8. The integer product within a group is exact. `dequantised` returns the weights as
float32.

Sums over the inputs (or groups) are computed in float32 (int32 for int8), in input order. A row's result therefore does
not depend on the other rows of the batch. With int4, every instruction-set level gives the same result.
"""

from __future__ import annotations

import mmap
from ctypes import CDLL, c_int, c_size_t, c_void_p
from dataclasses import dataclass

import torch

from kernels.native.library import Native
from kernels.native.structures import BFLOAT16, FLOAT32, FORMATS, INT4, INT8, STORE_BFLOAT16, STORE_FLOAT, CLinear

INT4_GROUP = 64
"""Number of inputs per group of int4 weights."""
_BLOCK = 16
_GROUP = INT4_GROUP
_GROUP_BYTES = 9 * 64
"""Bytes of one group for 16 outputs: one line with scales and zero points, and eight lines with weights."""
_MOST_ZERO = 16
"""Largest zero point of an int4 group: 16, because zero points in GPTQ are offset by 1."""
_SYMMETRIC = 0
"""Value passed to the library for `symmetric`: 0, because groups have zero points."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights in the packed format of `kernels.native`."""

    structure: CLinear
    outputs: int
    inputs: int
    tensors: tuple[torch.Tensor, ...]
    """Tensors that `structure` points to, kept alive."""
    parts: object = None
    """Structures that `structure` points to, kept alive."""

    def __call__(self, x: torch.Tensor, kernels: Native) -> torch.Tensor:
        """Multiply ``x`` ``[rows, inputs]`` (float32 or bfloat16); return ``[rows, outputs]`` in the dtype of ``x``."""
        out = torch.empty(len(x), self.outputs, dtype=x.dtype)
        store = STORE_BFLOAT16 if x.dtype == torch.bfloat16 else STORE_FLOAT
        kernels.linear(self.structure, x.contiguous(), out, store, self.outputs)
        return out


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch form of a product with packed float weights; float64 inputs are computed in float64."""
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def quantised_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch form of a product with int8 weights: quantises weights and activations, and sums exactly."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(
        _rounded(x.to(wide)), _rounded(weight.to(wide)), None if bias is None else bias.to(wide)
    ).to(x.dtype)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, x)


def empty_weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised weight ``[outputs, inputs]`` for `pack`, followed by padding that is zero."""
    return empty_weights(1, outputs, inputs, dtype)[0]


def empty_weights(count: int, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate uninitialised weights ``[count, outputs, inputs]`` for packing one by one; the padding is zero.

    The memory uses huge pages if possible. This saves page walks, because every step streams all weights.
    """
    per_step = 4 // dtype.itemsize
    padded = (count, -(-outputs // _BLOCK) * _BLOCK, -(-inputs // per_step) * per_step)
    if padded == (count, outputs, inputs):
        weights = torch.empty(padded, dtype=dtype)
        advise_huge_pages(weights)
    else:
        weights = torch.zeros(padded, dtype=dtype)
    return weights[:, :outputs, :inputs]


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None, *, kernels: Native) -> PackedLinear:
    """Pack a weight allocated by `empty_weight` in place; ``weight`` must not be read as a matrix afterwards."""
    outputs, inputs = weight.shape
    kernels.library.quire_pack_in_place(FORMATS[weight.dtype], weight.data_ptr(), outputs, inputs)
    return _packed(FORMATS[weight.dtype], outputs, inputs, weight, bias)


def unpacked_rows(linear: PackedLinear, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of packed float weights, as an embedding does.

    Args:
        linear: weights from `pack`.
        index: ``[...]`` int64, the outputs.
        dtype: dtype of the weights.

    Returns:
        ``[..., inputs]`` in this dtype.
    """
    per_step = 4 // dtype.itemsize
    blocks, steps = -(-linear.outputs // _BLOCK), -(-linear.inputs // per_step)
    sizes = (blocks, steps, _BLOCK, per_step)
    packed = linear.tensors[0].as_strided(sizes, (steps * _BLOCK * per_step, _BLOCK * per_step, per_step, 1))
    return packed[index // _BLOCK, :, index % _BLOCK].flatten(-2)[..., : linear.inputs]


def quantise(weight: torch.Tensor, bias: torch.Tensor | None = None, *, kernels: Native) -> PackedLinear:
    """Return an int8 copy of a weight ``[outputs, inputs]`` (float32 or bfloat16)."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // _BLOCK)
    packed = torch.empty(blocks * -(-inputs // 4) * 64, dtype=torch.int8)
    advise_huge_pages(packed)
    scales = torch.empty(blocks * _BLOCK, dtype=torch.float32)
    sums = torch.empty(blocks * _BLOCK, dtype=torch.int32)
    kernels.library.quire_quantise(
        FORMATS[weight.dtype],
        weight.data_ptr(),
        weight.stride(0),
        outputs,
        inputs,
        packed.data_ptr(),
        scales.data_ptr(),
        sums.data_ptr(),
    )
    return _packed(INT8, outputs, inputs, packed, bias, scales, sums)


def quantise_int4(weight: torch.Tensor, bias: torch.Tensor | None = None, *, kernels: Native) -> PackedLinear:
    """Return an int4 copy of a weight ``[outputs, inputs]`` (float32 or bfloat16).

    Each group has a zero point, so that the 16 values span the range from the group's smallest to its largest weight,
    including zero. A fixed zero point of 8 (symmetric) would take as much memory and be less accurate.
    """
    outputs, inputs = weight.shape
    packed = torch.empty(-(-outputs // _BLOCK) * -(-inputs // _GROUP) * _GROUP_BYTES, dtype=torch.uint8)
    advise_huge_pages(packed)
    kernels.library.quire_quantise_int4(
        FORMATS[weight.dtype], weight.data_ptr(), weight.stride(0), outputs, inputs, _SYMMETRIC, packed.data_ptr()
    )
    return _packed(INT4, outputs, inputs, packed, bias)


def pack_int8(codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Pack int8 weights that are already quantised.

    Args:
        codes: ``[outputs, inputs]`` int8.
        scales: ``[outputs]``; a weight is its code times its output's scale.
        bias: ``[outputs]``.
    """
    outputs, inputs = codes.shape
    blocks, steps = -(-outputs // _BLOCK), -(-inputs // 4)
    padded = torch.nn.functional.pad(codes, (0, steps * 4 - inputs, 0, blocks * _BLOCK - outputs))
    packed = padded.view(blocks, _BLOCK, steps, 4).transpose(1, 2).contiguous()
    sums = padded.sum(1, dtype=torch.int32)
    wide_scales = torch.nn.functional.pad(scales.float(), (0, blocks * _BLOCK - outputs)).contiguous()
    return _packed(INT8, outputs, inputs, packed, bias, wide_scales, sums)


def fits_int4(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> bool:
    """Return whether `pack_int4` can represent these scales and zero points exactly."""
    within = [bool((x >= 0).all() and (x <= most).all()) for x, most in ((codes, 15), (zeros, _MOST_ZERO))]
    return all(within) and not bool((scales.float().view(torch.int32) & 0xFF).any())


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None = None
) -> PackedLinear:
    """Pack int4 weights that are already quantised and for which `fits_int4` is true.

    Args:
        codes: ``[outputs, inputs]`` uint8, from 0 to 15.
        scales: ``[outputs, groups]``; a weight is (its code - its group's zero point) * its group's scale.
        zeros: ``[outputs, groups]``.
        bias: ``[outputs]``.
    """
    outputs, inputs = codes.shape
    blocks, groups = -(-outputs // _BLOCK), -(-inputs // _GROUP)
    missing = blocks * _BLOCK - outputs
    padded = torch.nn.functional.pad(codes, (0, groups * _GROUP - inputs, 0, missing))
    # [blocks, 16, groups, 8 lines, 2 nibbles, 4]: each line contains two sets of four inputs per output.
    halves = padded.view(blocks, _BLOCK, groups, 8, 2, 4)
    lines = (halves[:, :, :, :, 0] | halves[:, :, :, :, 1] << 4).permute(0, 2, 3, 1, 4)
    wide_scales, wide_zeros = (
        torch.nn.functional.pad(x.float(), (0, 0, 0, missing)).view(blocks, _BLOCK, groups).transpose(1, 2).contiguous()
        for x in (scales, zeros)
    )
    octets = wide_scales.view(torch.uint8).view(blocks, groups, _BLOCK, 4)  # bytes of a float32, lowest first
    packed = torch.empty(blocks, groups, 9, 64, dtype=torch.uint8)
    packed[:, :, 0, :32] = octets[..., 2:].flatten(2)
    packed[:, :, 0, 32:48] = octets[..., 1]
    packed[:, :, 0, 48:] = wide_zeros.byte()
    packed[:, :, 1:] = lines.reshape(blocks, groups, 8, 64)
    return _packed(INT4, outputs, inputs, packed.flatten(), bias)


def dequantised(linear: PackedLinear) -> torch.Tensor:
    """Return the weights ``[outputs, inputs]`` that packed int4 weights represent, in float32."""
    groups = linear.tensors[0].view(-1, -(-linear.inputs // _GROUP), 9, 64)
    header = groups[:, :, 0]  # [blocks, groups, 64]
    octets = torch.zeros(*header.shape[:2], _BLOCK, 4, dtype=torch.uint8)
    octets[..., 2:] = header[..., :32].unflatten(-1, (_BLOCK, 2))  # type: ignore[no-untyped-call]
    octets[..., 1] = header[..., 32:48]
    scales = octets.view(torch.float32)[..., None, None, :, :]
    zeros = header[..., None, None, 48:, None].float()
    lines = groups[:, :, 1:].reshape(*groups.shape[:2], 8, _BLOCK, 4)
    values = torch.stack((lines & 15, lines >> 4), 3).float()  # [blocks, groups, 8, 2, 16, 4]
    weights: torch.Tensor = (values - zeros) * scales
    return weights.permute(0, 4, 1, 2, 3, 5).reshape(len(groups) * _BLOCK, -1)[: linear.outputs, : linear.inputs]


def _packed(
    num_format: int,
    outputs: int,
    inputs: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> PackedLinear:
    assert num_format in (FLOAT32, BFLOAT16, INT8, INT4)
    wide_bias = None if bias is None else bias.float().contiguous()
    kept = (weight, wide_bias, scales, sums)
    structure = CLinear(
        num_format, 0, outputs, inputs, *(None if tensor is None else tensor.data_ptr() for tensor in kept)
    )
    return PackedLinear(structure, outputs, inputs, tuple(tensor for tensor in kept if tensor is not None))


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel to use huge pages for a large tensor, before the tensor is first written."""
    huge = 2 << 20
    begin = -(-tensor.data_ptr() // huge) * huge
    end = (tensor.data_ptr() + tensor.nbytes) // huge * huge
    if end > begin and hasattr(mmap, "MADV_HUGEPAGE"):
        madvise = CDLL(None).madvise
        madvise.argtypes = [c_void_p, c_size_t, c_int]
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # Best effort, so ignore the result.
