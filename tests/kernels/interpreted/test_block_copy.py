"""Copies of blocks by address against copies by index."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import BlockPool, copy_blocks, copy_blocks_reference
from tests.examples import examples

CPU = torch.device("cpu")


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_copy_blocks(data: st.DataObject) -> None:
    """Any blocks in tensors of several sizes and types are copied to their targets, and nothing else changes."""
    shapes = data.draw(st.lists(st.sampled_from([(2, 8, 64), (1, 16, 80), (3, 24, 128)]), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
    num_old, num_new = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    old = [(torch.rand(num_old, *shape) * 200).to(dtype) for shape in shapes]
    new = [torch.zeros(num_new, *shape, dtype=dtype) for shape in shapes]
    expected = [tensor.clone() for tensor in new]
    count = data.draw(st.integers(0, num_new))
    blocks = torch.stack((torch.randint(num_old, (count,)), torch.randperm(num_new)[:count]))
    copy_blocks(BlockPool(old, CPU), BlockPool(new, CPU), blocks)
    copy_blocks_reference(BlockPool(old, CPU), BlockPool(expected, CPU), blocks)

    for ours, theirs in zip(new, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert count == 0 or any(bool(tensor.float().any()) for tensor in new)
