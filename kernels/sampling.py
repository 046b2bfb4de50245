"""Samples each row's next token: temperature, top-k, top-p, min-p, typical-p and the random choice.

The filters are those of `transformers`, in the same order and with the same rules. Each filter works on the previous
one's result, in float32 logits:

1. temperature: divide. A row with temperature 0 is *greedy*: no filter, no noise, the largest logit, ties to the lowest
   index.
2. top-k: remove tokens with logits below the k-th largest (tokens that tie with the k-th largest stay).
3. top-p (nucleus; Holtzman et al., 2020): sort ascending, remove tokens while the cumulative probability is <= 1 - p.
   The most probable token always stays. If the threshold falls between equal logits, lower indices stay. (In
   transformers this depends on an unstable sort; here it must be the same on all machines.)
4. min-p (Nguyen et al., 2024): remove tokens with less than p times the probability of the most probable token.
5. typical-p (Meister et al., 2022): sort tokens by the distance between their information and the distribution's
   entropy, and keep the nearest tokens until their probability reaches p.

Tokens are sampled with the Gumbel-max trick: the argmax of ``logit + gumbel`` is distributed as softmax(logit). The
noise is a pure function of (seed, position, choice, vocabulary index), specified in `kernels.philox`. A sampled token
therefore does not depend on the other rows of the batch.

`nonfinite_rows` finds rows whose logits cannot be sampled. `sample` returns a valid token index for such rows too.
After the step, the worker fails only these rows.

On a CPU the kernels in `kernels.native` implement all of this except typical-p. They do not sort the vocabulary, and
compute noise only for tokens that may win. Their tokens equal those of `sample_reference`, except for a token so close
to the top-p threshold that the order of summation decides. On CUDA, `kernels.sampling_triton` filters and samples
without host synchronisation, and sorts only for typical-p. On CUDA, too, the same logits give the same token in every
batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels._dispatch import runs_on_triton
from kernels.native.library import Native
from kernels.native.sampling import argmax_native, sample_native
from kernels.native.serving import native
from kernels.philox import gumbel_from_words, random_words_at
from kernels.sampling_reference import SamplingTensors, process_logits_reference, sample_reference

__all__ = [
    "SamplingTensors",
    "greedy",
    "native_for",
    "nonfinite_rows",
    "process_logits_reference",
    "sample",
    "sample_checked",
    "sample_reference",
]

_SMALL_VOCAB = 4096  # up to this size, one batched sort is cheaper than a loop over rows
# lower temperatures could overflow and would not change the result, because sampling is already greedy here
_COLDEST = 1e-30
_SORTED_ROWS = 16  # maximum number of rows in one sort on a GPU
_DENSE_ELEMENTS = 1 << 16  # logits that get noise at once; on a CPU, Philox makes a dozen passes over 8 bytes per logit


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Sample the next token of each row, ``[num_rows]`` int64.

    ``logits`` is ``[num_rows, vocab_size]`` of any float dtype. A batch of greedy rows needs only an argmax. Without
    truncation, no sort is needed.
    """
    if not params.any_random:
        return _argmax(logits)
    return sample_checked(logits, params).clamp_(min=0)


def sample_checked(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Sample as `sample` does, but return -1 for the rows that `nonfinite_rows` finds."""
    if not params.any_random:
        return greedy(logits)
    if runs_on_triton(logits):
        from kernels.sampling_triton import sample_triton

        if params.typical_p is None:
            return sample_triton(logits, params)
        return _sample_typical(logits, params)
    return _sample_cpu(logits, params)


def _sample_typical(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Compute `sample_checked` on a GPU with typical-p, some rows at a time, as sorting needs 70 bytes per logit."""
    from kernels.sampling_triton import draw_triton

    drawn = []
    for rows in range(0, len(logits), _SORTED_ROWS):
        part = slice(rows, rows + _SORTED_ROWS)
        own = _of_rows(params, part)
        drawn.append(draw_triton(process_logits_reference(logits[part], own), own, scaled=True))
    return torch.cat(drawn).masked_fill(nonfinite_rows(logits), -1)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's most likely token, ``[num_rows]`` int64; -1 for rows found by `nonfinite_rows`."""
    if runs_on_triton(logits):
        from kernels.sampling_triton import greedy_triton

        return greedy_triton(logits)
    kernels = native_for(logits)
    if kernels is not None:
        return argmax_native(logits, kernels)
    return logits.argmax(dim=-1).masked_fill(nonfinite_rows(logits), -1)


def nonfinite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return ``[num_rows]`` bool, True for a row that cannot be sampled: it has a NaN or +inf, or only -inf."""
    if runs_on_triton(logits):
        return greedy(logits) < 0
    kernels = native_for(logits)
    if kernels is not None:
        return argmax_native(logits, kernels) < 0
    # One pass suffices: the maximum is NaN or +inf if any element is, and -inf only if all elements are.
    return ~torch.isfinite(logits.amax(dim=-1))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest logit; the index is arbitrary for a row that cannot be sampled."""
    if runs_on_triton(logits):
        return greedy(logits).clamp_(min=0)
    kernels = native_for(logits)
    return logits.argmax(dim=-1) if kernels is None else argmax_native(logits, kernels).clamp_(min=0)


def native_for(logits: torch.Tensor) -> Native | None:
    """Return the native kernels if they support these logits: ``[rows, vocab]`` float32 on a CPU, contiguous rows."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        return None
    return native()


def _sample_cpu(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Compute `sample_checked` on a CPU, with the native kernels if available."""
    if logits.device.type == "cpu":
        logits = logits.to(torch.float32)
    kernels = native_for(logits)
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
    """Compute `sample_checked` on a CPU with torch, doing only the work that each row needs."""
    tokens = greedy(logits)
    vocab_size = logits.shape[1]
    random = (params.temperature > 0) & (tokens >= 0)
    sparse = random & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0))
    if vocab_size <= _SMALL_VOCAB:
        sparse = torch.zeros_like(sparse)
    if params.typical_p is not None:
        sparse &= params.typical_p >= 1  # typical-p needs a full sort of the distribution
    dense_rows = (random & ~sparse).nonzero().squeeze(1)
    for rows in torch.split(dense_rows, max(1, _DENSE_ELEMENTS // vocab_size)):
        tokens[rows] = sample_reference(logits[rows], _of_rows(params, rows))
    sparse_rows = sparse.nonzero().squeeze(1)
    if sparse_rows.numel():
        tokens[sparse_rows] = _sample_sparse(logits[sparse_rows], _of_rows(params, sparse_rows))
    return tokens


def _of_rows(params: SamplingTensors, rows: torch.Tensor | slice) -> SamplingTensors:
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
    """Sample non-greedy rows that all truncate, without sorting a large vocabulary or adding noise to all of it.

    The filters run row by row. The remaining tokens of all rows, padded to the longest, are sampled together, because
    Philox consists of a hundred small tensor operations whose overhead exceeds their work.
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
    """Return the tokens of one row that pass the filters, as ascending indices and scores."""
    vocab_size = scores.shape[0]
    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < vocab_size:
        kept = scores >= scores.topk(top_k).values[-1]
    index = kept.nonzero().squeeze(1)
    scores = scores[index]
    if top_p < 1.0:
        # Tokens with a total below the tail mass 1 - p are removed without a sort.
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
