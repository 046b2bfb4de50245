"""Triton kernels of `kernels.token_masks`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl


@kernel_with(varying=("places_ptr", "lines_ptr"))
def mask_tokens_kernel(
    logits_ptr: tl.tensor,
    places_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Mask the logits of TILE tokens in one row per program."""
    place = tl.load(places_ptr + tl.program_id(0))
    line = tl.load(lines_ptr + tl.program_id(0))
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    word = tl.load(masks_ptr + line * num_words + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits_ptr + place * row_stride + token, -float("inf"), mask=forbidden)
