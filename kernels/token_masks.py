"""Masks of allowed tokens, as bits, applied to logits.

A grammar allows a set of tokens per step. A mask has one bit per token, so the host sends a 32nd of what float32 logits
take, and the kernel writes only the logits of tokens that are not allowed. It reads no logits.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import kernel_with, runs_on_triton, tl

_TILE = 1024  # tokens per program


def mask_tokens(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, lines: torch.Tensor) -> None:
    """Set ``logits[places[i], t]`` to -inf, in place, where bit ``t`` of ``masks[lines[i]]`` is 0.

    logits: ``[num_rows, vocab_size]`` of any float dtype. masks: ``[num_masks, num_words]`` int32, contiguous, with
    ``32 * num_words >= vocab_size``; bit ``t % 32`` of word ``t // 32`` is token ``t``. places, lines: ``[n]`` int64;
    the places are distinct.
    """
    if not runs_on_triton(logits):
        mask_tokens_reference(logits, places, masks, lines)
        return
    vocab_size = logits.shape[1]
    _mask_tokens_kernel[(len(places), -(-vocab_size // _TILE))](
        logits, places, masks, lines, logits.stride(0), vocab_size, masks.shape[1], TILE=_TILE
    )


def mask_tokens_reference(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, lines: torch.Tensor) -> None:
    """Plain torch form of `mask_tokens`; also the CPU path."""
    octets = masks[lines].view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = (octets.unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[places] = logits[places].masked_fill(~allowed, -torch.inf)


@kernel_with(varying=("places_ptr", "lines_ptr"))
def _mask_tokens_kernel(
    logits_ptr: tl.tensor,
    places_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Write the logits of TILE tokens of one row per program."""
    place = tl.load(places_ptr + tl.program_id(0))
    line = tl.load(lines_ptr + tl.program_id(0))
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    word = tl.load(masks_ptr + line * num_words + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_ptr + place * row_stride + token, -float("inf"), mask=forbidden)
