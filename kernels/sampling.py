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

from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels._triton import runs_on_triton
from kernels.native.sampling import argmax_native, sample_native, sampling_kernels
from kernels.philox import gumbel_from_words, random_words, random_words_at
from kernels.sampling_triton import draw_triton, sample_triton

_SMALL_VOCAB = 4096  # up to here one batched sort is cheaper than looking at each row
_COLDEST = 1e-30  # a smaller temperature could overflow a logit; this one is greedy already
_DENSE_ELEMENTS = 1 << 16  # logits given noise at once: Philox on CPU makes a dozen passes over eight bytes for each


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch: one entry per row, on the device of the logits.

    The two booleans live on the host, because they choose what is launched; they may be true without need
    (slower, same result), never false wrongly.
    """

    temperature: torch.Tensor  # [num_rows] float32; 0: greedy
    top_k: torch.Tensor  # [num_rows] int32; 0: off
    top_p: torch.Tensor  # [num_rows] float32; 1: off
    min_p: torch.Tensor  # [num_rows] float32; 0: off
    seed: torch.Tensor  # [num_rows] int64; all 64 bits are the Philox key
    choice: torch.Tensor  # [num_rows] int32; which of the request's n choices
    position: torch.Tensor  # [num_rows] int32; absolute position of the token being sampled
    any_random: bool  # some row has temperature > 0
    any_truncation: bool  # some row with temperature > 0 has top_k, top_p or min_p on
    typical_p: torch.Tensor | None = None  # [num_rows] float32; 1: off; None: off for all


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
    kernels = sampling_kernels(logits)
    if kernels is not None:
        return argmax_native(logits, kernels)
    return logits.argmax(dim=-1).masked_fill(nonfinite_rows(logits), -1)


def nonfinite_rows(logits: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` bool: the row holds a NaN or +inf, or nothing but -inf, and cannot be sampled from."""
    kernels = sampling_kernels(logits)
    if kernels is not None:
        return argmax_native(logits, kernels) < 0
    # One pass: the maximum carries NaN and +inf along, and is -inf only when everything is.
    return ~torch.isfinite(logits.amax(dim=-1))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest logit; some index where a row has none."""
    kernels = sampling_kernels(logits)
    return logits.argmax(dim=-1) if kernels is None else argmax_native(logits, kernels).clamp_(min=0)


def sample_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Plain torch form of `sample`: filter everything, draw noise for everything."""
    scores = process_logits_reference(logits, params)
    noise = gumbel_from_words(random_words(params.seed, params.position, params.choice, logits.shape[1]))
    random = (params.temperature > 0).unsqueeze(1)
    return torch.where(random, scores + noise, scores).argmax(dim=-1)


def process_logits_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The float32 scores ``[num_rows, vocab_size]`` that the draw is made from: scaled, removed tokens at
    -inf.

    One ascending sort serves both top-k and top-p; nothing is read back to the host.
    """
    scores = logits.to(torch.float32)
    random = (params.temperature > 0).unsqueeze(1)
    scores = scores / torch.where(random, params.temperature.unsqueeze(1), 1.0)
    if not params.any_truncation and params.typical_p is None:
        return scores

    vocab_size = scores.shape[1]
    ordered, index = (x.flip(-1) for x in scores.sort(dim=-1, descending=True, stable=True))
    top_k = params.top_k.to(torch.int64).unsqueeze(1)
    kth = ordered.gather(1, vocab_size - torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size))
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)

    top_p = params.top_p.unsqueeze(1)
    removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    removed &= top_p < 1.0
    removed[:, -1] = False
    ordered = ordered.masked_fill(removed, -torch.inf)
    kept = torch.empty_like(scores).scatter_(1, index, ordered)

    probs = kept.softmax(dim=-1)
    unlikely = probs < params.min_p.unsqueeze(1) * probs.amax(dim=-1, keepdim=True)
    kept = kept.masked_fill(unlikely, -torch.inf)
    if params.typical_p is not None:
        kept = torch.where((params.typical_p < 1).unsqueeze(1), _typical(kept, params.typical_p), kept)
    return torch.where(random, kept, scores)


def _typical(scores: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """``scores`` with what locally typical sampling removes at -inf."""
    information = -scores.log_softmax(dim=-1)
    probs = scores.softmax(dim=-1)
    entropy = (information * probs).nansum(dim=-1, keepdim=True)
    distance, index = (information - entropy).abs().sort(dim=-1, stable=True)
    mass = scores.gather(-1, index).softmax(dim=-1).cumsum(dim=-1)
    last = (mass < typical_p.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    removed = distance > distance.gather(-1, last)
    removed[:, 0] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter_(1, index, removed), -torch.inf)


def _sample_cpu(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """`sample_checked` on CPU: by its kernels, where they are."""
    if logits.device.type == "cpu":
        logits = logits.to(torch.float32)
    kernels = sampling_kernels(logits)
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
