"""The largest logit of each row, found by the CPU kernels."""

from __future__ import annotations

import torch

from kernels.native.library import Native, native


def argmax_kernels(logits: torch.Tensor) -> Native | None:
    """The kernels, if they take these logits: ``[rows, vocab]`` float32 on a CPU, each row contiguous."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        return None
    return native()


def argmax_native(logits: torch.Tensor, kernels: Native) -> torch.Tensor:
    """``[rows]`` int64: index of the largest, the first among equals; -1 where none can be chosen (a NaN or +inf in the
    row, or nothing but -inf)."""
    found = torch.empty(len(logits), dtype=torch.int64)
    rows, count = logits.shape
    kernels.library.quire_argmax(kernels.level, logits.data_ptr(), rows, logits.stride(0), count, found.data_ptr())
    return found
