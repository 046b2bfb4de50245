"""Scattered writes of 32-bit words to a state tensor on the device.

A worker's state on the device (block tables, decode rows, computed tokens) changes in a few places per step. The host
sends the places and their new words as one buffer, and one kernel writes them. A step thus costs one copy and one
launch for any number of tensors, and neither if nothing changes.

Rules: the places of one call are distinct; the state is one flat int32 tensor, and all its parts are views.
"""

from __future__ import annotations

import torch

from kernels._dispatch import runs_on_triton

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
        from kernels.gpu.scatter import scatter_words_kernel

        scatter_words_kernel[(-(-num_words // _TILE),)](state, changes, num_words, TILE=_TILE)


def scatter_words_reference(state: torch.Tensor, changes: torch.Tensor) -> None:
    """Plain torch form of `scatter_words`; also the CPU path."""
    state.index_copy_(0, changes[0].long(), changes[1])
