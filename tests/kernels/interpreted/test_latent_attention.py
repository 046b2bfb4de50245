"""The kernel of latent attention against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_cache import write_kv
from kernels.kv_cache_reference import write_kv_reference
from kernels.kv_quantised import QUANTISED
from kernels.latent_attention import latent_attention, latent_attention_reference
from kernels.paged_attention import launch
from tests.kernels.latent_batches import LatentBatch, latent_batch


def assert_equals_reference(batch: LatentBatch, tolerance: float = 1e-5) -> None:
    """Assert that the kernel's result equals the reference."""
    got = latent_attention(*batch.tensors, max_query_len=batch.max_query_len, scale=0.1)
    expected = latent_attention_reference(*batch.exact, scale=0.1)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_heads", "rank", "rotary_dim"), [(4, 64, 32), (20, 48, 16), (33, 32, 8)])
def test_decode(num_heads: int, rank: int, rotary_dim: int) -> None:
    """Decode equals the reference for any number of heads and for sizes that are no power of two."""
    rows = [(1, 1), (63, 1), (64, 1), (130, 1)]
    assert_equals_reference(latent_batch(rows, num_heads=num_heads, rank=rank, rotary_dim=rotary_dim))


@pytest.mark.parametrize("num_heads", [4, 20])
def test_mixed_batches(num_heads: int) -> None:
    """One batch has prompt chunks and decode rows."""
    rows = [(5, 5), (33, 1), (70, 40), (31, 2), (1, 1)]
    assert_equals_reference(latent_batch(rows, num_heads=num_heads))


@pytest.mark.parametrize("rows", [[(150, 1), (90, 1)], [(150, 30)]])
def test_keys_divided_into_parts(rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs divide the keys of a tile; a part may have no keys, and a row with context 0 is zero."""
    monkeypatch.setattr(launch, "_MIN_PART", 16)
    launch.parts_of_keys.cache_clear()
    batch = latent_batch(rows)
    assert_equals_reference(batch)
    batch.context_lens[0] = 0
    if batch.max_query_len == 1:
        got = latent_attention(*batch.tensors, max_query_len=1, scale=0.1)
        assert torch.equal(got[0], torch.zeros_like(got[0]))
    launch.parts_of_keys.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, *QUANTISED], ids=str)
def test_types_of_cache(dtype: torch.dtype) -> None:
    """Each type of cache, in decode and in a chunk."""
    assert_equals_reference(latent_batch([(70, 1), (40, 20)], dtype=dtype), 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("dtype", [torch.float32, *QUANTISED], ids=str)
def test_keys_and_values_of_different_sizes_are_written(dtype: torch.dtype) -> None:
    """Latent vectors and rotary keys go into their slots."""
    ours, expected = (latent_batch([(40, 1), (9, 1)], rank=96, dtype=dtype) for _ in range(2))
    latent, rotary = torch.randn(3, 1, 96), torch.randn(3, 1, 32)
    slots = torch.tensor([17, -1, 5])

    write_kv(latent, rotary, ours.latent_cache, ours.rotary_cache, slots)
    write_kv_reference(latent, rotary, expected.latent_cache, expected.rotary_cache, slots)

    for one, other in ((ours.latent_cache, expected.latent_cache), (ours.rotary_cache, expected.rotary_cache)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
