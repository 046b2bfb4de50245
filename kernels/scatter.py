"""Scattered writes of 32-bit words to a state tensor on the device.

Each step changes a few words of a worker's state on the device (block tables, decode rows, computed tokens). The host
sends the indices and the new words in one buffer, and one kernel writes them. A step thus needs one copy and one launch
for any number of tensors, and none if nothing changes.

Rules: the indices in one call are distinct. The state is one flat int32 tensor; its parts are views of this tensor.
"""

from __future__ import annotations

import torch

from kernels._dispatch import runs_on_triton

_TILE = 1024  # words per program


def scatter_words(state: torch.Tensor, changes: torch.Tensor) -> None:
    """Assign ``state[changes[0]] = changes[1]``, in place.

    state: ``[n]`` int32. changes: ``[2, m]`` int32, contiguous; indices ``0 <= changes[0] < n``, all distinct.
    """
    if not runs_on_triton(state):
        scatter_words_reference(state, changes)
        return
    num_words = changes.shape[1]
    if num_words:
        from kernels.gpu.scatter import scatter_words_kernel

        scatter_words_kernel[(-(-num_words // _TILE),)](state, changes, num_words, TILE=_TILE)


def scatter_words_reference(state: torch.Tensor, changes: torch.Tensor) -> None:
    """Plain torch form of `scatter_words`, which is also the CPU path."""
    state.index_copy_(0, changes[0].long(), changes[1])
