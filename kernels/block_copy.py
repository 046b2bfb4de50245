"""Copies whole KV blocks: one launch copies all blocks in a plan for all layers.

A *pool* is a list of tensors ``[num_blocks, …]``, two per layer. Block b of each source tensor is copied to block c of
the target tensor at the same index. Source and target may be the same pool (copy-on-write), or one may be on the GPU
and the other in pinned host memory. A GPU can address pinned memory, so a swap is one kernel instead of one copy per
block and layer.

Rules: targets are distinct, and no block of a pool is both source and target in one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels._dispatch import INTERPRETED

_TILE = 1024  # 8-byte words that a program copies at once
_MOST_PROGRAMS = 8192  # with more copies, each program loops over several copies
_PROGRAMS_BESIDE = 32  # 256 KiB in flight saturate the bus to the host and leave most of the GPU to concurrent steps


class BlockPool:
    """Block tensors, and one device tensor with their addresses, which kernels read."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Create a pool from contiguous tensors on ``device`` (where kernels run) or in pinned host memory."""
        self.tensors = list(tensors)
        block_bytes = [tensor.shape[1:].numel() * tensor.itemsize for tensor in self.tensors]
        has_kernels = INTERPRETED or device.type in ("cuda", "meta")
        self.on_triton = has_kernels and all(size % 8 == 0 for size in block_bytes)
        if self.on_triton:
            addresses = [0 if tensor.is_meta else tensor.data_ptr() for tensor in self.tensors]
            self.addresses = torch.tensor(addresses, device=device)
            self.words = torch.tensor([size // 8 for size in block_bytes], device=device)


def copy_blocks(source: BlockPool, target: BlockPool, blocks: torch.Tensor, *, beside: bool = False) -> None:
    """Copy block ``blocks[0, i]`` of each ``source`` tensor to block ``blocks[1, i]`` of its ``target`` tensor.

    Args:
        source: pool to read.
        target: pool to write.
        blocks: ``[2, n]`` int64 on the device where the kernels run: source and target block numbers.
        beside: use few programs, so that other kernels can run on the GPU at the same time.
    """
    if not (source.on_triton and target.on_triton):
        copy_blocks_reference(source, target, blocks)
        return
    num_copies = blocks.shape[1]
    if num_copies:
        num_tensors = len(source.tensors)
        num_programs = min(num_copies * num_tensors, _PROGRAMS_BESIDE if beside else _MOST_PROGRAMS)
        from kernels.gpu.block_copy import copy_blocks_kernel

        copy_blocks_kernel[(num_programs,)](
            source.addresses, target.addresses, source.words, blocks, num_copies, num_tensors, TILE=_TILE, num_warps=8
        )


def copy_blocks_reference(source: BlockPool, target: BlockPool, blocks: torch.Tensor) -> None:
    """Plain torch form of `copy_blocks`, which is also the CPU path."""
    for old, new in zip(source.tensors, target.tensors, strict=True):
        chosen = old.index_select(0, blocks[0].to(old.device))
        new.index_copy_(0, blocks[1].to(new.device), chosen.to(new.device))
