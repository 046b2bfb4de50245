"""The attention kernels against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.fp8 import quantize
from kernels.paged_attention import launch, paged_attention, paged_attention_reference
from tests.kernels.batches import PagedBatch, as_float64, paged_batch


def assert_equals_reference(
    batch: PagedBatch, window: int | None = None, cap: float | None = None, tolerance: float = 1e-5
) -> None:
    def call(attend: object, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert callable(attend)
        result = attend(*tensors, max_query_len=batch.max_query_len, scale=0.125, sliding_window=window, soft_cap=cap)
        assert isinstance(result, torch.Tensor)
        return result

    torch.testing.assert_close(
        call(paged_attention, batch.tensors).double(),
        call(paged_attention_reference, as_float64(batch)),
        rtol=tolerance,
        atol=tolerance,
    )


def in_eight_bits(batch: PagedBatch) -> PagedBatch:
    """The batch with its cache quantised; places that no row owns stay NaN."""
    return replace(batch, k_cache=quantize(batch.k_cache * 4), v_cache=quantize(batch.v_cache * 40))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decode(block_size: int, head_dim: int) -> None:
    """Decode equals the reference for any page size and for head dimensions that are no power of two."""
    rows = [(1, 1), (63, 1), (64, 1), (300, 1)]
    assert_equals_reference(paged_batch(rows, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_mixed_batch(block_size: int, head_dim: int) -> None:
    """Rows in decode and rows with chunks, with and without a prefix, share one call."""
    rows = [(70, 33), (40, 1), (9, 9), (130, 65), (2, 1)]
    assert_equals_reference(paged_batch(rows, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(
    ("room", "num_sms", "window"), [(1, 132, None), (2, 132, None), (8, 132, 150), (8, 2, None), (8, 2, 150)]
)
def test_splits_meet_in_the_same_result(
    room: int, num_sms: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many splits the grid has room for and the lengths ask for, the result is the same; rows with one split,
    rows without keys and rows in prefill stand beside those with many."""
    monkeypatch.setattr(launch, "num_splits", lambda *_: room)
    monkeypatch.setattr(launch, "_MIN_KEYS_PER_SPLIT", 64)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda _: num_sms)
    assert_equals_reference(paged_batch([(600, 1), (0, 1), (3, 1), (129, 1), (200, 9)]), window)


@pytest.mark.parametrize(
    ("programs", "longest", "sms", "room"),
    [(8, 131072, 132, 64), (8, 4096, 132, 16), (8, 100, 132, 1), (2048, 131072, 132, 4), (8192, 131072, 132, 1)],
)
def test_room_for_splits(programs: int, longest: int, sms: int, room: int) -> None:
    """Few rows and long tables get many splits, large batches and short tables few."""
    assert launch.num_splits(programs, longest, sms) == room


@pytest.mark.parametrize("group_size", [1, 3, 8, 20])
def test_groups_of_query_heads(group_size: int) -> None:
    """Any number of query heads may share a KV head, more than a tile of 16 and odd ones too."""
    rows = [(50, 1), (40, 17)]
    assert_equals_reference(paged_batch(rows, num_heads=2 * group_size, num_kv_heads=2))


@pytest.mark.parametrize(("window", "cap"), [(1, None), (20, None), (None, 5.0), (70, 30.0), (1000, None)])
def test_window_and_cap(window: int | None, cap: float | None) -> None:
    """Sliding window and soft cap hold in decode, in chunks, and across the borders of key tiles."""
    assert_equals_reference(paged_batch([(200, 1), (150, 100), (10, 1)]), window, cap)


def test_float16() -> None:
    """A 16-bit cache is read with 16-bit accuracy."""
    assert_equals_reference(paged_batch([(90, 1), (70, 30)], dtype=torch.float16), tolerance=4e-3)


def test_cache_of_another_dtype_than_the_query() -> None:
    """float32 queries may read a float16 cache."""
    batch = paged_batch([(90, 1), (70, 30)], dtype=torch.float16)
    wide = replace(batch, query=batch.query.float() + 1e-4)
    assert_equals_reference(wide)


def test_cache_of_eight_bits() -> None:
    """A cache of e4m3 is read exactly: what is lost was lost on writing."""
    batch = in_eight_bits(paged_batch([(90, 1), (70, 30), (0, 1)]))
    assert_equals_reference(batch, tolerance=1e-3)  # values are up to 150
    assert_equals_reference(replace(batch, query=batch.query.half()), tolerance=1e-2)


def test_query_inside_a_packed_projection() -> None:
    """The query may be a strided view of a wider tensor."""
    batch = paged_batch([(90, 1), (70, 30)])
    packed = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
    view = packed[:, : batch.query.shape[1]]
    assert not view.is_contiguous()
    assert_equals_reference(replace(batch, query=view))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Any mix of rows, head counts, head dimensions, page sizes, windows and caps gives the reference's
    result."""
    contexts = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    rows = [(context, data.draw(st.integers(1, context) | st.just(1))) for context in contexts]
    num_kv_heads = data.draw(st.integers(1, 2))
    batch = paged_batch(
        rows,
        num_heads=num_kv_heads * data.draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([64, 72, 128])),
        block_size=data.draw(st.sampled_from([8, 16, 24, 64])),
        seed=data.draw(st.integers(0, 1000)),
    )
    if data.draw(st.booleans()):
        batch = in_eight_bits(batch)
    tolerance = 1e-5 * float(batch.v_cache.dtype.itemsize == 4) or 1e-3  # values are up to 150 in eight bits
    window, cap = data.draw(st.none() | st.integers(1, 100)), data.draw(st.none() | st.just(9.0))
    assert_equals_reference(batch, window, cap, tolerance)
