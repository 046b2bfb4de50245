"""Sampling the next token of each row: temperature, top-k, top-p, min-p, typical-p and the draw.

The filters are those of `transformers`' generation, in its order and with its rules; each works on what the
previous one left, on float32 logits:

1. temperature: divide. A row with temperature 0 is *greedy*: no filter, no noise, the largest logit, ties to
   the lowest index.
2. top-k: remove what is smaller than the k-th largest (ties with it stay).
3. top-p (nucleus; Holtzman et al., 2020): sort ascending, remove while the cumulative probability is <= 1 -
   p; the most probable token always stays. Where the border falls between equal logits, lower indices stay
   (transformers leaves that to its sort, which is not stable; here it may not differ between machines).
4. min-p (Nguyen et al., 2024): remove what is less probable than p times the most probable token.
5. typical-p (Meister et al., 2022): sort by how far a token's information is from the distribution's entropy,
   keep the nearest ones until their probability reaches p.

The draw is Gumbel-max: the argmax of ``logit + gumbel`` is distributed as softmax(logit). The noise is a pure
function of (seed, position, choice, vocabulary index), specified in `kernels.philox`, so no draw depends on
the batch around it.

`nonfinite_rows` finds rows whose logits cannot be sampled from. `sample` still returns a valid token index
for such rows: the worker fails them alone, after the step.

On a CPU the kernels of `kernels.native` do all of this but typical-p, without sorting the vocabulary, and compute noise
only where it may matter. Their draws are those of `sample_reference`, but for a token so near the border of top-p that
the order in which masses are added decides whether it stays. On CUDA it is selection and a draw, without a sort and
without host synchronisation (`kernels.sampling_triton`); only typical-p sorts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels._triton import runs_on_triton
from kernels.native.library import Native
from kernels.native.sampling import argmax_native, sample_native
from kernels.native.serving import native
from kernels.philox import gumbel_from_words, random_words_at
from kernels.sampling_reference import SamplingTensors, process_logits_reference, sample_reference
from kernels.sampling_triton import draw_triton, sample_triton

__all__ = [
    "SamplingTensors",
    "greedy",
    "nonfinite_rows",
    "process_logits_reference",
    "sample",
    "sample_checked",
    "sample_reference",
]

_SMALL_VOCAB = 4096  # up to here one batched sort is cheaper than looking at each row
_COLDEST = 1e-30  # a smaller temperature could overflow a logit; this one is greedy already
_DENSE_ELEMENTS = 1 << 16  # logits given noise at once: Philox on CPU makes a dozen passes over eight bytes for each


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The next token of each row: ``[num_rows]`` int64, from ``logits`` ``[num_rows, vocab_size]`` of any
    float dtype.

    A batch of greedy rows costs one argmax; a batch without truncation never sorts.
    """
    if not params.any_random:
        return _argmax(logits)
    if runs_on_triton(logits):
        if params.typical_p is not None:
            return draw_triton(process_logits_reference(logits, params), params)
        return sample_triton(logits, params)
    return _sample_cpu(logits, params).clamp_(min=0)


def sample_checked(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The same, but -1 for those of `nonfinite_rows`."""
    if not params.any_random:
        return greedy(logits)
    if runs_on_triton(logits):
        return sample(logits, params).masked_fill(nonfinite_rows(logits), -1)
    return _sample_cpu(logits, params)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, ``[num_rows]`` int64; -1 for those of `nonfinite_rows`."""
    kernels = _kernels_for(logits)
    if kernels is not None:
        return argmax_native(logits, kernels)
    return logits.argmax(dim=-1).masked_fill(nonfinite_rows(logits), -1)


def nonfinite_rows(logits: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` bool: the row holds a NaN or +inf, or nothing but -inf, and cannot be sampled from."""
    kernels = _kernels_for(logits)
    if kernels is not None:
        return argmax_native(logits, kernels) < 0
    # One pass: the maximum carries NaN and +inf along, and is -inf only when everything is.
    return ~torch.isfinite(logits.amax(dim=-1))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit; some index where a row has none."""
    kernels = _kernels_for(logits)
    return logits.argmax(dim=-1) if kernels is None else argmax_native(logits, kernels).clamp_(min=0)


def _kernels_for(logits: torch.Tensor) -> Native | None:
    """The kernels, if they take these logits: ``[rows, vocab]`` float32 on a CPU, each row contiguous."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        return None
    return native()


def _sample_cpu(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`sample_checked` on CPU: by its kernels, where they are."""
    if logits.device.type == "cpu":
        logits = logits.to(torch.float32)
    kernels = _kernels_for(logits)
    if kernels is None:
        return _sample_by_torch(logits, params)
    if params.typical_p is None:
        return sample_native(logits, params, kernels)
    scores = process_logits_reference(logits, params)
    found = sample_native(
        scores, replace(params, temperature=(params.temperature > 0).float(), any_truncation=False), kernels
    )
    return found.masked_fill_(nonfinite_rows(logits), -1)


def _sample_by_torch(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`sample_checked` on CPU: each row gets only the work that its own parameters ask for."""
    tokens = greedy(logits)
    vocab_size = logits.shape[1]
    random = (params.temperature > 0) & (tokens >= 0)
    sparse = random & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0))
    if vocab_size <= _SMALL_VOCAB:
        sparse = torch.zeros_like(sparse)
    if params.typical_p is not None:
        sparse &= params.typical_p >= 1  # it needs the whole distribution sorted
    dense_rows = (random & ~sparse).nonzero().squeeze(1)
    for rows in torch.split(dense_rows, max(1, _DENSE_ELEMENTS // vocab_size)):
        tokens[rows] = sample_reference(logits[rows], _of_rows(params, rows))
    sparse_rows = sparse.nonzero().squeeze(1)
    if sparse_rows.numel():
        tokens[sparse_rows] = _sample_sparse(logits[sparse_rows], _of_rows(params, sparse_rows))
    return tokens


def _of_rows(params: SamplingTensors, rows: torch.Tensor) -> SamplingTensors:
    return SamplingTensors(
        temperature=params.temperature[rows],
        top_k=params.top_k[rows],
        top_p=params.top_p[rows],
        min_p=params.min_p[rows],
        seed=params.seed[rows],
        choice=params.choice[rows],
        position=params.position[rows],
        any_random=params.any_random,
        any_truncation=params.any_truncation,
        typical_p=None if params.typical_p is None else params.typical_p[rows],
    )


def _sample_sparse(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`sample` for random rows that all truncate: a large vocabulary is neither sorted nor given noise as a
    whole.

    Filters run row by row; the rows' survivors, padded to the longest, then share one draw: a hundred small
    tensor operations make up Philox, and each costs more than the numbers in it.
    """
    top_ks, top_ps, min_ps = params.top_k.tolist(), params.top_p.tolist(), params.min_p.tolist()
    scaled = logits.to(torch.float32) / params.temperature.clamp(min=_COLDEST).unsqueeze(1)
    survivors = [
        _survivors(scores, top_k, top_p, min_p)
        for scores, top_k, top_p, min_p in zip(scaled, top_ks, top_ps, min_ps, strict=True)
    ]
    index = pad_sequence([index for index, _ in survivors], batch_first=True)
    scores = pad_sequence([scores for _, scores in survivors], batch_first=True, padding_value=-torch.inf)
    noise = gumbel_from_words(random_words_at(params.seed, params.position, params.choice, index))
    winner = (scores + noise).argmax(dim=1, keepdim=True)
    return index.gather(1, winner).squeeze(1)


def _survivors(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of one row that the filters leave: ascending indices and their scores."""
    vocab_size = scores.shape[0]
    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < vocab_size:
        kept = scores >= scores.topk(top_k).values[-1]
    index = kept.nonzero().squeeze(1)
    scores = scores[index]
    if top_p < 1.0:
        # Tokens too improbable to fill the tail of 1 - p even all together are gone: only the others need
        # sorting.
        probs = scores.softmax(dim=0)
        possible = probs >= 0.999 * (1.0 - top_p) / vocab_size
        tail = probs.masked_fill(possible, 0.0).sum()
        place = possible.nonzero().squeeze(1)
        ordered, order = (x.flip(0) for x in probs[place].sort(descending=True, stable=True))
        nucleus = ordered.cumsum(dim=0) + tail > 1.0 - top_p
        nucleus[-1] = True
        kept = torch.zeros_like(possible).index_fill_(0, place[order[nucleus]], True)
        index, scores = index[kept], scores[kept]
    if min_p > 0.0:
        probs = scores.softmax(dim=0)
        kept = probs >= min_p * probs.max()
        index, scores = index[kept], scores[kept]
    return index, scores
