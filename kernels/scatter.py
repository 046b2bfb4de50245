"""Scattered writes of 32-bit words to a state tensor on the device.

A worker's state on the device (block tables, decode rows, computed tokens) changes in a few places per step. The host
sends the places and their new words as one buffer, and one kernel writes them. A step thus costs one copy and one
launch for any number of tensors, and neither if nothing changes.

Rules: the places of one call are distinct; the state is one flat int32 tensor, and all its parts are views.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import kernel_with, runs_on_triton, tl

_TILE = 1024  # words per program


def scatter_words(state: torch.Tensor, changes: torch.Tensor) -> None:
    """Assign ``state[changes[0]] = changes[1]``, in place.

    state: ``[n]`` int32. changes: ``[2, m]`` int32, contiguous; places ``0 <= changes[0] < n``, all distinct.
    """
    if not runs_on_triton(state):
        scatter_words_reference(state, changes)
        return
    num_words = changes.shape[1]
    if num_words:
        _scatter_words_kernel[(-(-num_words // _TILE),)](state, changes, num_words, TILE=_TILE)


def scatter_words_reference(state: torch.Tensor, changes: torch.Tensor) -> None:
    """Plain torch form of `scatter_words`; also the CPU path."""
    state.index_copy_(0, changes[0].long(), changes[1])


@kernel_with(varying=("num_words",))
def _scatter_words_kernel(
    state_ptr: tl.tensor, changes_ptr: tl.tensor, num_words: tl.tensor, TILE: tl.constexpr
) -> None:
    """Write TILE words per program."""
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < num_words
    place = tl.load(changes_ptr + word, mask=inside, other=0)
    value = tl.load(changes_ptr + num_words + word, mask=inside, other=0)
    tl.store(state_ptr + place, value, mask=inside)
