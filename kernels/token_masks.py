"""Bit masks of allowed tokens, applied to logits.

A grammar permits a set of tokens in each step. A mask has one bit per token, so the host sends 1/32 of the size of
float32 logits. The kernel reads no logits, and writes only those of forbidden tokens.
"""

from __future__ import annotations

import torch

from kernels._dispatch import runs_on_triton

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
    from kernels.gpu.token_masks import mask_tokens_kernel

    mask_tokens_kernel[(len(places), -(-vocab_size // _TILE))](
        logits, places, masks, lines, logits.stride(0), vocab_size, masks.shape[1], TILE=_TILE
    )


def mask_tokens_reference(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, lines: torch.Tensor) -> None:
    """Plain torch form of `mask_tokens`, which is also the CPU path."""
    octets = masks[lines].view(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = (octets.unsqueeze(2) >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[places] = logits[places].masked_fill(~allowed, -torch.inf)
