"""Token sampling by several ranks, each of which has the logits for a part of the vocabulary.

A token's noise does not depend on how the vocabulary is divided (`kernels.philox`). The largest score plus noise over
the whole vocabulary is therefore the maximum over the parts. Each rank finds the best token in its part
(`best_in_part`), the ranks exchange the results, and every rank computes the same choice (`best_of_parts`). This is the
token that `kernels.sampling.sample_checked` would sample from the whole vocabulary's logits. It holds only for rows
without top-k, top-p, min-p and typical-p, which depend on the whole distribution.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels._dispatch import runs_on_triton
from kernels.native.sampling import sample_native
from kernels.philox import gumbel_from_words, random_words
from kernels.sampling import greedy, native_for, nonfinite_rows
from kernels.sampling_reference import SamplingTensors, process_logits_reference

_NOT_FINITE = -1
"""Replaces a token if the part has a NaN or +inf, so that the row cannot be sampled."""
_ONLY_LOW = -2
"""Replaces a token if the part has only -inf; other parts may have a token."""


def best_in_part(logits: torch.Tensor, params: SamplingTensors, first: int) -> torch.Tensor:
    """Find each row's best token in a part of the vocabulary.

    Args:
        logits: ``[num_rows, part_size]`` of any float dtype: the part.
        params: the rows' parameters; their filters are not applied.
        first: vocabulary index of the first logit, a multiple of 32.

    Returns:
        ``[num_rows, 2]`` int32, for `best_of_parts`: the bits of the sum in float32, and the vocabulary index.
    """
    params = replace(params, any_truncation=False, typical_p=None)
    if not params.any_random:
        tokens = greedy(logits)
        sums = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1).to(torch.float32)
    elif runs_on_triton(logits):
        from kernels.sampling_triton import draw_best_triton

        sums, tokens = draw_best_triton(logits, params, first)
    else:
        sums, tokens = _draw_cpu(logits.to(torch.float32), params, first)
    if logits.device.type != "cpu" or bool((tokens < 0).any()):
        tokens = tokens.masked_fill((tokens < 0) & (logits.amax(dim=1) == -torch.inf), _ONLY_LOW)
    tokens = torch.where(tokens < 0, tokens, tokens + first)
    return torch.stack((sums.view(torch.int32), tokens.to(torch.int32)), dim=1)


def best_of_parts(found: torch.Tensor) -> torch.Tensor:
    """Choose the best token of each row, ties to the lowest index.

    Args:
        found: ``[num_parts, num_rows, 2]`` int32: the results of `best_in_part`, ascending by vocabulary index.

    Returns:
        ``[num_rows]`` int64; -1 for rows found by `kernels.sampling.nonfinite_rows`.
    """
    sums, tokens = found[..., 0].contiguous().view(torch.float32), found[..., 1].to(torch.int64)
    best, token = sums[0], tokens[0]
    for other_sum, other in zip(sums[1:], tokens[1:], strict=True):
        better = (other >= 0) & ((token < 0) | (other_sum > best))
        best, token = torch.where(better, other_sum, best), torch.where(better, other, token)
    return token.masked_fill((tokens == _NOT_FINITE).any(dim=0), -1).clamp(min=-1)


def _draw_cpu(logits: torch.Tensor, params: SamplingTensors, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    kernels = native_for(logits)
    if kernels is not None:
        sums = torch.empty(len(logits))
        return sums, sample_native(logits, params, kernels, first=first, sums=sums)
    scores = process_logits_reference(logits, params)
    noise = gumbel_from_words(random_words(params.seed, params.position, params.choice, logits.shape[1], first))
    random = (params.temperature > 0).unsqueeze(1)
    sums, tokens = torch.where(random, scores + noise, scores).max(dim=1)
    return sums, tokens.masked_fill(nonfinite_rows(logits), -1)
