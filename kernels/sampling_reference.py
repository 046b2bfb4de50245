"""Defines sampling in plain torch, with its parameters; `kernels.sampling` documents the rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.philox import gumbel_from_words, random_words


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """A batch's sampling parameters: one entry per row, on the logits' device.

    The two booleans are on the host, because the host uses them to choose kernels. True is always safe but may be
    slower; False is allowed only if no row needs the feature.
    """

    temperature: torch.Tensor  # [num_rows] float32; 0 for greedy
    top_k: torch.Tensor  # [num_rows] int32; 0 for off
    top_p: torch.Tensor  # [num_rows] float32; 1 for off
    min_p: torch.Tensor  # [num_rows] float32; 0 for off
    seed: torch.Tensor  # [num_rows] int64; all 64 bits are the Philox key
    choice: torch.Tensor  # [num_rows] int32; index of the choice (n > 1)
    position: torch.Tensor  # [num_rows] int32; absolute position of the token being sampled
    any_random: bool  # at least one row has temperature > 0
    any_truncation: bool  # at least one row with temperature > 0 uses top_k, top_p or min_p
    typical_p: torch.Tensor | None = None  # [num_rows] float32; 1 for off; None if off for all rows


def sample_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Plain torch form of `sample`: applies all filters, and adds noise to the whole vocabulary."""
    scores = process_logits_reference(logits, params)
    noise = gumbel_from_words(random_words(params.seed, params.position, params.choice, logits.shape[1]))
    random = (params.temperature > 0).unsqueeze(1)
    return torch.where(random, scores + noise, scores).argmax(dim=-1)


def process_logits_reference(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Return float32 scores ``[num_rows, vocab_size]`` for the draw: logits / temperature, -inf for removed tokens.

    One ascending sort serves top-k and top-p; no value is read back to the host.
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
    """Return ``scores`` with -inf for the tokens that locally typical sampling removes."""
    information = -scores.log_softmax(dim=-1)
    probs = scores.softmax(dim=-1)
    entropy = (information * probs).nansum(dim=-1, keepdim=True)
    distance, index = (information - entropy).abs().sort(dim=-1, stable=True)
    mass = scores.gather(-1, index).softmax(dim=-1).cumsum(dim=-1)
    last = (mass < typical_p.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    removed = distance > distance.gather(-1, last)
    removed[:, 0] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter_(1, index, removed), -torch.inf)
