"""Writing keys and values into their slots."""

from __future__ import annotations

import torch

from kernels.kv_cache import write_kv
from kernels.kv_cache_reference import write_kv_reference


def test_each_token_lands_in_its_slot_and_nowhere_else() -> None:
    """Slot s is position s % block_size in block s // block_size; other positions keep their content."""
    key, value = torch.randn(2, 3, 2, 8)
    k_cache, v_cache = torch.full((4, 2, 16, 8), 7.0), torch.full((4, 2, 16, 8), 9.0)
    write_kv(key, value, k_cache, v_cache, torch.tensor([17, 0, 63]))

    for token, (block, offset) in enumerate([(1, 1), (0, 0), (3, 15)]):
        assert torch.equal(k_cache[block, :, offset], key[token])
        assert torch.equal(v_cache[block, :, offset], value[token])
    assert int((k_cache == 7.0).all(-1).sum()) == 4 * 2 * 16 - 3 * 2
    assert int((v_cache == 9.0).all(-1).sum()) == 4 * 2 * 16 - 3 * 2


def test_negative_slots_write_nothing() -> None:
    """A padding token, marked by a negative slot, leaves the cache alone."""
    key, value = torch.randn(2, 3, 2, 8)
    k_cache, v_cache = torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)
    write_kv(key, value, k_cache, v_cache, torch.tensor([-1, 5, -1]))

    assert torch.equal(k_cache[1, :, 1], key[1])
    assert torch.equal(v_cache[1, :, 1], value[1])
    assert int(k_cache.any(-1).sum()) == int(v_cache.any(-1).sum()) == 2


def test_values_are_cast_to_the_caches_dtype() -> None:
    """A float32 key is rounded to nearest into a bfloat16 cache."""
    key = torch.randn(1, 2, 8)
    k_cache, v_cache = torch.zeros(2, 1, 2, 4, 8, dtype=torch.bfloat16)
    write_kv(key, key, k_cache, v_cache, torch.tensor([2]))

    assert torch.equal(k_cache[0, :, 2], key[0].bfloat16())


def test_strided_heads_of_two_sizes_are_copied() -> None:
    """Keys and values that are views into a larger tensor, with heads of two sizes, land where the reference puts them.

    There are so many tokens that several threads write.
    """
    num_tokens, num_heads = 700, 3
    packed = torch.randn(num_heads, num_tokens, 60).bfloat16().transpose(0, 1)
    key, value = packed[..., :40], packed[..., 40:56]
    slots = torch.randperm(100 * 16)[:num_tokens]
    slots[::7] = -1
    k_cache, v_cache = (torch.zeros(100, num_heads, 16, size, dtype=torch.bfloat16) for size in (40, 16))
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    write_kv(key, value, k_cache, v_cache, slots)
    write_kv_reference(key, value, k_expected, v_expected, slots)

    assert k_cache.any()
    assert torch.equal(k_cache, k_expected)
    assert torch.equal(v_cache, v_expected)
