"""Sampling the next token of each row: temperature, top-k, top-p, min-p and the draw.

The filters are those of `transformers`' generation, in its order and with its rules; each works on what the previous
one left, on float32 logits:

1. temperature: divide. A row with temperature 0 is *greedy*: no filter, no noise, the largest logit, ties to the lowest index.
2. top-k: remove what is smaller than the k-th largest (ties with it stay).
3. top-p (nucleus; Holtzman et al., 2020): sort ascending, remove while the cumulative probability is <= 1 - p; the most probable
   token always stays.
4. min-p (Nguyen et al., 2024): remove what is less probable than p times the most probable token.

The draw is Gumbel-max: the argmax of ``logit + gumbel`` is distributed as softmax(logit). The noise is a pure function
of (seed, position, choice, vocabulary index), specified in `kernels.philox`, so no draw depends on the batch around it.

`nonfinite_rows` finds rows whose logits cannot be sampled from. `sample` still returns a valid token index for such rows: the
worker fails them alone, after the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.philox import gumbel_from_words, random_words


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of a batch: one entry per row, on the device of the logits.

    The two booleans live on the host, because they choose what is launched; they may be true without need (slower, same
    result), never false wrongly.
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


def sample(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The next token of each row: ``[num_rows]`` int64, from ``logits`` ``[num_rows, vocab_size]`` of any float dtype.

    A batch of greedy rows costs one argmax; a batch without truncation never sorts.
    """
    if not params.any_random:
        return logits.argmax(dim=-1)
    return sample_reference(logits, params)


def nonfinite_rows(logits: torch.Tensor) -> torch.Tensor:
    """``[num_rows]`` bool: the row holds a NaN or +inf, or nothing but -inf, and cannot be sampled from."""
    # One pass: the maximum carries NaN and +inf along, and is -inf only when everything is.
    return ~torch.isfinite(logits.amax(dim=-1))


def sample_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Plain torch form of `sample`: filter everything, draw noise for everything."""
    scores = process_logits_reference(logits, params)
    noise = gumbel_from_words(random_words(params.seed, params.position, params.choice, logits.shape[1]))
    random = (params.temperature > 0).unsqueeze(1)
    return torch.where(random, scores + noise, scores).argmax(dim=-1)


def process_logits_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The float32 scores ``[num_rows, vocab_size]`` that the draw is made from: scaled, removed tokens at -inf.

    One ascending sort serves both top-k and top-p; nothing is read back to the host.
    """
    scores = logits.to(torch.float32)
    random = (params.temperature > 0).unsqueeze(1)
    scores = scores / torch.where(random, params.temperature.unsqueeze(1), 1.0)
    if not params.any_truncation:
        return scores

    vocab_size = scores.shape[1]
    ordered, index = scores.sort(dim=-1)
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
    return torch.where(random, kept.masked_fill(unlikely, -torch.inf), scores)
