"""Pools with more than 2^31 elements, which fit on an H100: no index in them is computed in 32 bits.

The pools only reserve address space; memory is used only for touched pages.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from kernels.block_copy import BlockPool, copy_blocks
from kernels.kv_cache import write_kv
from kernels.kv_quantised import parts_of, quantise_heads
from kernels.paged_attention import paged_attention, paged_attention_reference
from kernels.qkv import rotate_and_cache

KV_HEADS, PAGE, HEAD_DIM = 2, 16, 64
NUM_BLOCKS = 2**31 // (KV_HEADS * PAGE * HEAD_DIM) + 9
LAST = range(NUM_BLOCKS - 8, NUM_BLOCKS)
"""Blocks that begin beyond 2^31 elements."""


@pytest.fixture
def caches() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in eight bits."""

    def reserve() -> torch.Tensor:
        size = NUM_BLOCKS * KV_HEADS * PAGE * (HEAD_DIM + 4)
        space = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        return torch.from_numpy(space).view(NUM_BLOCKS, KV_HEADS, PAGE, HEAD_DIM + 4)

    return reserve(), reserve()


def test_written_and_read_at_the_end(caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Both ways of writing, decode, prefill and copies reach the last blocks of a large pool."""
    k_cache, v_cache = caches
    generator = torch.Generator().manual_seed(0)
    contexts, lengths = [40, 33], [1, 20]
    tables = torch.tensor([list(LAST)[:3], list(LAST)[3:6]], dtype=torch.int32)
    for row, context in enumerate(contexts):
        position = torch.arange(context)
        slots = tables[row, position // PAGE].long() * PAGE + position % PAGE
        key, value = torch.randn(2, context, KV_HEADS, HEAD_DIM, generator=generator)
        if row:
            write_kv(key, value, k_cache, v_cache, slots)
        else:
            packed = torch.cat((key, key, value), dim=1).flatten(1)
            ones, zeros = torch.ones(context, HEAD_DIM // 2), torch.zeros(context, HEAD_DIM // 2)
            rotate_and_cache(packed, None, None, 1e-6, ones, zeros, k_cache, v_cache, slots)
        for cache, given in ((k_cache, key), (v_cache, value)):
            found = [part[slots // PAGE, :, slots % PAGE] for part in parts_of(cache)]
            assert all(map(torch.equal, found, quantise_heads(given, torch.uint8)))

    query = torch.randn(sum(lengths), 4, HEAD_DIM, generator=generator)
    rows = (tables, torch.tensor([0, 1, 21], dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))
    ours = paged_attention(query, k_cache, v_cache, *rows, max_query_len=20, scale=0.1)
    expected = paged_attention_reference(query, k_cache, v_cache, *rows, max_query_len=20, scale=0.1)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    pool = BlockPool([k_cache, v_cache], k_cache.device)
    copy_blocks(pool, pool, torch.tensor([[LAST[0], LAST[4]], [LAST[7], 1]]))
    assert torch.equal(k_cache[LAST[7]], k_cache[LAST[0]])
    assert torch.equal(v_cache[1], v_cache[LAST[4]])
