"""RMSNorm with the native CPU kernels; `kernels.norm` defines the result."""

from __future__ import annotations

import torch

from kernels.native.library import Native
from kernels.native.structures import FORMATS, CNorm

LANES = 16
"""The size of a vector must be a multiple of this."""


def rms_norm_native(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds_twice: bool, kernels: Native
) -> torch.Tensor:
    """Compute RMSNorm over the last dimension of ``x`` ``[..., dim]`` in float32.

    Args:
        x: float32 or bfloat16; ``dim`` is a multiple of `LANES`.
        weight: ``[dim]`` float32, contiguous, with the offset added.
        eps: added to the mean of the squares.
        rounds_twice: whether the result is rounded to the dtype of ``x`` before it is multiplied by the weight.
        kernels: the native kernels.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``.
    """
    x = x.contiguous()
    dim = x.shape[-1]
    out = torch.empty_like(x)
    kernels.rms_norm(
        CNorm(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            eps=eps,
            format=FORMATS[x.dtype],
            rounds_twice=rounds_twice,
            rows=x.numel() // dim,
            dim=dim,
        )
    )
    return out
