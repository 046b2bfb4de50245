"""Triton kernels of `kernels.block_copy`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel_with, tl


@kernel_with(varying=("num_copies", "num_tensors"))
def copy_blocks_kernel(
    source_addresses_ptr: tl.tensor,
    target_addresses_ptr: tl.tensor,
    words_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_copies: tl.tensor,
    num_tensors: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Copy one block of one tensor per iteration, in a grid-stride loop."""
    for job in range(tl.program_id(0), num_copies * num_tensors, tl.num_programs(0)):
        tensor, copy = job // num_copies, job % num_copies
        words = tl.load(words_ptr + tensor)
        source_ptr = tl.load(source_addresses_ptr + tensor).to(tl.pointer_type(tl.int64))
        target_ptr = tl.load(target_addresses_ptr + tensor).to(tl.pointer_type(tl.int64))
        source_ptr += tl.load(blocks_ptr + copy) * words
        target_ptr += tl.load(blocks_ptr + num_copies + copy) * words
        for first in range(0, words, TILE):
            word = first + tl.arange(0, TILE)
            value = tl.load(source_ptr + word, mask=word < words, other=0)
            tl.store(target_ptr + word, value, mask=word < words)
