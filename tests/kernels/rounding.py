"""What two ways to compute the same may differ by: processors sum in another order, and have exponentials of their own.

Bitwise equality is required only where it is promised: for copies, integers, random bits, single roundings, and our own
kernels compared with themselves.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.philox import gumbel_from_words, random_words
from kernels.sampling import SamplingTensors, process_logits_reference


def assert_rounded_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both round at the same points, so they differ by a few units in the last place, and in 16 bits hardly anywhere.

    16-bit results are computed in float32 and rounded. Float32 differences change one rounding in thousands, but an
    additional or missing rounding changes many results.
    """
    assert ours.dtype == theirs.dtype
    step = 4 * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=step, atol=step * torch.finfo(ours.dtype).smallest_normal)
    if ours.element_size() == 2:
        assert int((ours != theirs).sum()) <= 0.01 * ours.numel()


def possible_scores(logits: torch.Tensor, params: SamplingTensors) -> list[torch.Tensor]:
    """The tokens that the filters keep: the exact border, and where rounding in a sum of probabilities may move it."""
    return [process_logits_reference(logits, _moved(params, step)) for step in (0.0, _BORDER, -_BORDER)]


def assert_survivors(
    found: torch.Tensor, logits: torch.Tensor, params: SamplingTensors, *, any_of_equals: bool = False
) -> None:
    """`found` are the scores `[rows, vocab_size]` that the filters leave, or as many with `any_of_equals`."""
    possible = possible_scores(logits, params)
    if any_of_equals:
        found, *possible = (scores.sort(dim=-1).values for scores in (found, *possible))
    assert torch.stack([(found == scores).all(1) for scores in possible]).any(0).all()


def assert_drawn(
    tokens: torch.Tensor, logits: torch.Tensor, params: SamplingTensors, *, noise_error: float = 0.0
) -> None:
    """`tokens` `[rows]` are the reference's draws, of what the filters leave.

    Args:
        tokens: what was drawn.
        logits: `[rows, vocab_size]`.
        params: the rows' parameters.
        noise_error: largest error of the noise used; 0 on a CPU.
    """
    noise = gumbel_from_words(random_words(params.seed, params.position, params.choice, logits.shape[1]))
    noise = torch.where((params.temperature > 0).unsqueeze(1), noise, 0.0)
    behind = []
    for scores in possible_scores(logits, params):
        sums = scores + noise
        # Greedy and random sampling follow the same rule: the first of equal sums wins. Only a rounding error in the
        # noise may change that.
        first = sums.argmax(1) == tokens
        lost = sums.amax(1) - sums.gather(1, tokens.unsqueeze(1)).squeeze(1)
        behind.append(first | (lost <= noise_error) if noise_error else first)
    assert torch.stack(behind).any(0).all(), tokens


_BORDER = 64 * torch.finfo(torch.float32).eps
"""Of a sum of some thousand probabilities in float32."""


def _moved(params: SamplingTensors, step: float) -> SamplingTensors:
    """The same filters with borders moved by `step`; what is off stays off."""
    typical_p = params.typical_p
    return replace(
        params,
        top_p=torch.where(params.top_p < 1, params.top_p + step, params.top_p),
        min_p=(params.min_p * (1 + step)).clamp(max=1.0),
        typical_p=None if typical_p is None else torch.where(typical_p < 1, typical_p + step, typical_p),
    )
