"""Sampling with the native CPU kernels: argmax, and filters with a random draw."""

from __future__ import annotations

import torch

from kernels.native.library import Native
from kernels.native.structures import CSampling
from kernels.sampling_reference import SamplingTensors


def argmax_native(logits: torch.Tensor, kernels: Native) -> torch.Tensor:
    """Return the index of each row's largest logit, ``[rows]`` int64; the first index if several are equal.

    The index is -1 for a row that has a NaN or +inf, or only -inf.
    """
    rows, count = logits.shape
    found = torch.empty(rows, dtype=torch.int64)
    kernels.library.quire_argmax(kernels.level, logits.data_ptr(), rows, logits.stride(0), count, found.data_ptr())
    return found


def sample_native(
    logits: torch.Tensor,
    params: SamplingTensors,
    kernels: Native,
    *,
    first: int = 0,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `kernels.sampling.sample` without ``typical_p``: ``[rows]`` int64, -1 as in `argmax_native`.

    Noise is computed only for tokens that may win, so that no array as large as the vocabulary is written. ``first`` is
    the vocabulary index of the first logit, a multiple of 32; returned tokens are relative to ``first``. ``sums``
    ``[rows]`` float32 receives each sampled token's score plus noise.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    columns = {"temperature": params.temperature, "seed": params.seed}
    columns |= {"choice": params.choice, "position": params.position}
    if params.any_truncation:
        columns |= {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    contiguous = {name: column.contiguous() for name, column in columns.items()}
    kernels.sample(
        CSampling(
            logits=logits.data_ptr(),
            rows=len(logits),
            stride=logits.stride(0),
            vocab=logits.shape[1],
            tokens=tokens.data_ptr(),
            first=first,
            sums=None if sums is None else sums.data_ptr(),
            **{name: column.data_ptr() for name, column in contiguous.items()},
        )
    )
    return tokens
