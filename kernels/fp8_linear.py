"""``y = x Wᵀ + b`` on a GPU with weights and activations in e4m3 (W8A8).

Weights have a scale per block of outputs and inputs, such as 128 x 128 (DeepSeek, Qwen), or per output. Activations
are quantised at run time: each token has a scale per block of inputs, or one scale if the weights have one per output.
A scale is the largest magnitude divided by 448. Products of e4m3 numbers are summed in float32 within a block, and the
sums of the blocks are scaled and added in order.

`torch._scaled_mm` computes weights with a scale per output, where its layout fits; the Triton kernel computes all
others. GPUs before sm_89 have no products over e4m3: `kernels.weight_only` serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from kernels._dispatch import INTERPRETED, architecture, next_power_of_2, runs_on_triton

LARGEST = 448.0
DEEP = 128
"""Inputs of a step of the kernel; the inputs of a block are a multiple of it, or all."""
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weights in e4m3 of a linear layer, or of one layer of all experts of a mixture.

    The tensors of experts have the expert as additional first dimension.
    """

    codes: torch.Tensor
    """``[outputs, inputs]`` uint8; the inputs are a multiple of 128."""
    scales: torch.Tensor
    """``[output blocks, groups]`` float32."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale; the outputs are 1 or a multiple of 64."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.codes.shape[-2]

    def to(self, device: torch.device) -> Fp8Weight:
        """Return the weights on a device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def expert(self, number: int) -> Fp8Weight:
        """Return the weights of one expert."""
        return replace(self, codes=self.codes[number], scales=self.scales[number])


def stack(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Return the weights of all experts as one; None if their blocks differ."""
    if len({each.block for each in weights}) > 1:
        return None
    codes, scales = (torch.stack(each) for each in zip(*((each.codes, each.scales) for each in weights), strict=True))
    return replace(weights[0], codes=codes, scales=scales)


def fits(outputs: int, inputs: int, block: tuple[int, int]) -> bool:
    """Return whether the kernel computes weights of these sizes."""
    high, wide = block
    return inputs % DEEP == 0 and (wide >= inputs or wide % DEEP == 0) and (high == 1 or high % 64 == 0) and outputs > 0


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply ``x`` ``[..., inputs]`` (bfloat16, float16 or float32); return ``[..., outputs]`` in the same type."""
    if not runs_on_triton(x):
        return fp8_linear_reference(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _launch(rows, weight, bias).view(*x.shape[:-1], weight.outputs)


def fp8_linear_reference(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch form of `fp8_linear`; also the CPU path. float64 is computed in float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    size = min(weight.block[1], x.shape[-1])
    groups = x.to(wide).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    scales = groups.abs().amax(-1, keepdim=True).float() / LARGEST
    factor = torch.where(scales > 0, 1 / scales, 0).to(wide)
    rounded = (groups * factor).float().to(torch.float8_e4m3fn).to(wide) * scales.to(wide)
    return linear(rounded.flatten(-2), dequantised(weight).to(wide), None if bias is None else bias.to(wide)).to(
        x.dtype
    )


def quantise_weight(weight: torch.Tensor) -> Fp8Weight | None:
    """Quantise weights ``[outputs, inputs]`` with one scale per output; None if the sizes do not fit."""
    outputs, inputs = weight.shape
    if not fits(outputs, inputs, (1, inputs)):
        return None
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST
    codes = torch.where(scales > 0, wide / scales, 0).to(torch.float8_e4m3fn).view(torch.uint8)
    return Fp8Weight(codes, scales, (1, inputs))


def dequantised(weight: Fp8Weight) -> torch.Tensor:
    """Return the weights ``[outputs, inputs]`` in float32."""
    outputs, inputs = weight.codes.shape
    high, wide = weight.block
    scales = weight.scales.repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
    return weight.codes.view(torch.float8_e4m3fn).float() * scales


def quantise_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations ``[rows, inputs]`` on a GPU, with a scale per row and group of inputs.

    Returns: codes ``[rows, inputs]`` uint8, and scales ``[rows, groups]`` float32.
    """
    from kernels.gpu.fp8_linear import quantise_rows_kernel

    rows, inputs = x.shape
    groups = inputs // group
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    native = architecture(x) >= 89
    quantise_rows_kernel[(rows, groups)](
        x, codes, scales, inputs, groups, GROUP=group, SIZE=next_power_of_2(group), NATIVE=native, num_warps=4
    )
    return codes, scales


def _launch(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    from kernels.gpu.fp8_linear import fp8_linear_kernel

    rows, inputs = x.shape
    outputs = weight.outputs
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    high, wide = weight.block
    group = min(wide, inputs)
    groups = inputs // group
    codes, scales = quantise_rows(x, group)
    if _by_torch(x, weight, groups):
        return torch._scaled_mm(
            codes.view(torch.float8_e4m3fn),
            weight.codes.view(torch.float8_e4m3fn).t(),
            scale_a=scales,
            scale_b=weight.scales.t().contiguous(),
            bias=bias,
            out_dtype=x.dtype,
        )
    tall = 16 if rows <= _FEW_ROWS else 64
    across = tile_outputs(weight, tall)
    fp8_linear_kernel[(-(-rows // tall), -(-outputs // across))](
        codes,
        scales,
        weight.codes,
        weight.scales,
        bias,
        out,
        rows,
        outputs,
        inputs,
        groups,
        GROUP=0 if groups == 1 else group,
        HIGH=high,
        NATIVE=architecture(x) >= 89,
        TALL=tall,
        WIDE=across,
        DEEP=DEEP,
        num_warps=4,
        num_stages=4 if tall == 16 else 3,
    )
    return out


def tile_outputs(weight: Fp8Weight, tall: int) -> int:
    """Return the outputs of a tile with ``tall`` rows."""
    return 64 if weight.block[0] > 1 or tall == 16 else 128


def _by_torch(x: torch.Tensor, weight: Fp8Weight, groups: int) -> bool:
    """Return whether `torch._scaled_mm` has the layout: scales per row and output, sizes that are multiples of 16."""
    return (
        x.is_cuda
        and not INTERPRETED
        and architecture(x) >= 90
        and groups == 1
        and weight.block[0] == 1
        and x.dtype == torch.bfloat16
        and weight.outputs % 16 == 0
    )
