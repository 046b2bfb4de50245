"""Triton kernels of `kernels.scatter`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl


@kernel_with(varying=("num_words",))
def scatter_words_kernel(
    state_ptr: tl.tensor, changes_ptr: tl.tensor, num_words: tl.tensor, TILE: tl.constexpr
) -> None:
    """Write TILE words per program."""
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < num_words
    place = tl.load(changes_ptr + word, mask=inside, other=0)
    value = tl.load(changes_ptr + num_words + word, mask=inside, other=0)
    tl.store(state_ptr + place, value, mask=inside)
