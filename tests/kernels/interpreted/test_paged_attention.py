"""The attention kernels against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_quantised import QUANTISED
from kernels.paged_attention import launch, paged_attention, paged_attention_reference, schedule
from tests.examples import examples
from tests.kernels.batches import (
    PagedBatch,
    as_float64,
    paged_batch,
    quantised_types,
    with_quantised_cache,
    with_released_blocks,
)


def rarely(*values: object) -> Any:
    """Return parameters that `make test` leaves to `make test-all`: the interpreter takes seconds for each batch."""
    return pytest.param(*values, marks=pytest.mark.release)


def assert_equals_reference(
    batch: PagedBatch,
    window: int | None = None,
    cap: float | None = None,
    tolerance: float = 1e-5,
    sinks: torch.Tensor | None = None,
    **known: int,
) -> None:
    """Assert that the kernel's result equals the reference."""

    def call(attend: object, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert callable(attend)
        hints = known if attend is paged_attention else {}
        options = {"max_query_len": batch.max_query_len, "sliding_window": window, "soft_cap": cap, "sinks": sinks}
        result = attend(*tensors, scale=0.125, **options, **hints)
        assert isinstance(result, torch.Tensor)
        return result

    torch.testing.assert_close(
        call(paged_attention, batch.tensors).double(),
        call(paged_attention_reference, as_float64(batch)),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(80, 8), (64, 16), (80, 128), rarely(64, 8), rarely(80, 16), rarely(64, 128)],
)
def test_decode(block_size: int, head_dim: int) -> None:
    """Decode equals the reference for any page size and for head dimensions that are no power of two."""
    rows = [(1, 1), (63, 1), (64, 1), (300, 1)]
    assert_equals_reference(paged_batch(rows, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(64, 8), (96, 16), rarely(96, 8), rarely(64, 16), rarely(64, 128), rarely(96, 128)],
)
def test_mixed_batch(block_size: int, head_dim: int) -> None:
    """Rows in decode and rows with chunks, with and without a prefix, share one call."""
    rows = [(70, 33), (40, 1), (9, 9), (130, 65), (2, 1)]
    assert_equals_reference(paged_batch(rows, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("num_decodes", [5, rarely(1), rarely(40)])
def test_rows_known_to_decode_are_passed_over(num_decodes: int) -> None:
    """The caller's knowledge about the batch changes no result: leading decode rows, or no decode rows at all."""
    chunks = [(70, 33), (9, 9), (130, 40), (40, 40)]
    assert_equals_reference(paged_batch([(20, 1)] * num_decodes + chunks), num_leading_decodes=num_decodes)
    assert_equals_reference(paged_batch([(20, 1)] * num_decodes + [(5, 1), *chunks]), num_leading_decodes=num_decodes)
    assert_equals_reference(paged_batch(chunks), min_query_len=9)


def test_a_captured_batch_is_padded_at_both_ends() -> None:
    """Rows without tokens come first, and tokens without a row come last; the end of the decode rows is unknown."""
    rows = [(20, 1), (33, 1), (40, 1), (70, 33), (9, 9), (130, 65)]
    batch = paged_batch([(0, 0)] * 3 + rows)
    beyond = torch.full((9, *batch.query.shape[1:]), torch.nan)
    padded = replace(batch, query=torch.cat((batch.query, beyond)), max_query_len=len(batch.query) + 9)

    expected = paged_attention_reference(*as_float64(batch), max_query_len=batch.max_query_len, scale=0.125)
    for known in (0, 4):
        ours = paged_attention(
            *padded.tensors, max_query_len=padded.max_query_len, scale=0.125, num_leading_decodes=known
        )
        torch.testing.assert_close(ours[: len(batch.query)].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_sms", "window"),
    [
        (1, None),
        (2, 150),
        (132, None),
        rarely(1, 1),
        rarely(1, 150),
        rarely(2, None),
        rarely(2, 1),
        rarely(132, 1),
        rarely(132, 150),
    ],
)
def test_shares_meet_in_the_same_result(num_sms: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the number of shares.

    Rows with one share, rows without keys and prefill rows are in the same batch as rows with many shares.
    """
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda _: num_sms)
    monkeypatch.setattr(launch, "_SHARES_TILE", 4)
    assert_equals_reference(paged_batch([(1300, 1), (0, 1), (3, 1), (129, 1), (200, 9)]), window)


@pytest.mark.parametrize(
    ("num_decodes", "window", "cap"),
    [
        (0, 100, None),
        (3, None, 5.0),
        rarely(0, None, None),
        rarely(0, None, 5.0),
        rarely(3, None, None),
        rarely(3, 100, None),
    ],
)
def test_parts_of_a_chunks_keys_meet_in_the_same_result(
    num_decodes: int, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result does not depend on how many programs divide a chunk's keys."""
    monkeypatch.setattr(launch, "parts_of_keys", lambda *_: 5)
    rows = [(50, 1)] * num_decodes + [(300, 17), (20, 1), (20, 20), (150, 2)]
    assert_equals_reference(paged_batch(rows), window, cap, num_leading_decodes=num_decodes)
    assert_equals_reference(paged_batch([(300, 40)]), window, cap, min_query_len=40)


def test_few_long_chunks_are_divided_and_many_are_not() -> None:
    """Few programs divide their keys until every multiprocessor has work; a full GPU and short contexts do not."""
    assert launch.parts_of_keys(32, 132, 100_000) == 4
    assert launch.parts_of_keys(1, 132, 1 << 20) > 4
    assert launch.parts_of_keys(100, 132, 1500) == 1
    assert launch.parts_of_keys(32, 132, 1500) == 1
    assert launch.parts_of_keys(132, 132, 100_000) == 1
    assert launch.parts_of_keys(2048, 132, 100_000) == 1


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_a_schedule_shares_out_every_key_once(data: st.DataObject) -> None:
    """A row's shares are consecutive and together cover the keys in its window exactly once.

    Only rows without keys have an empty share. Prefill rows have none. The grid's size is never exceeded.
    """
    contexts = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12))
    in_decode = [data.draw(st.booleans()) or context < 2 for context in contexts]
    window = data.draw(st.none() | st.integers(1, 2000))
    num_kv_heads = data.draw(st.integers(1, 8))
    lengths = torch.tensor([1 if decodes else 2 for decodes in in_decode])
    made = schedule.schedule_decode(
        torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int(),
        torch.tensor(contexts, dtype=torch.int32),
        num_kv_heads=num_kv_heads,
        sliding_window=window,
    )
    assert made is not None
    shares, programs, next_share = made.shares.tolist(), made.programs.tolist(), 0

    for row, context in enumerate(contexts):
        own = [share for share in shares[next_share : programs[-1]] if share[0] == row]
        assert own == shares[next_share : next_share + len(own)]
        assert bool(own) == in_decode[row]
        token = int(lengths[:row].sum())
        assert all(share[3:6] == [next_share, len(own), token] for share in own)
        if own:
            assert own[0][1] == max(context - (window or context), 0)
            assert own[-1][2] == context
            assert all(before[2] == after[1] for before, after in pairwise(own))
            assert len(own) == 1 or all(end > begin for _, begin, end, *_ in own)
        next_share += len(own)
    assert programs[0] == 0
    assert programs[-1] == next_share <= len(shares)
    assert all(before <= after for before, after in pairwise(programs))
    assert not made.finished.any()


def test_every_program_reads_the_same_number_of_keys() -> None:
    """The largest share equals that of an equal division, in units of 64 keys."""

    def most_keys(contexts: list[int]) -> int:
        starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
        made = schedule.schedule_decode(starts, torch.tensor(contexts, dtype=torch.int32), num_kv_heads=8)
        assert made is not None
        # Two for each of the 132 multiprocessors, divided by the number of KV heads.
        assert made.programs.shape == (34,)
        keys = [end - begin for _, begin, end, *_ in made.shares.tolist()]
        return max(int(sum(keys[first:beyond])) for first, beyond in pairwise(made.programs.tolist()))

    assert most_keys([1024]) == 2 * 64
    assert most_keys([131072]) == 63 * 64
    assert most_keys([1024] * 300) == 146 * 64  # More rows than one tile holds.
    assert most_keys([100] * 63 + [60000]) == 33 * 64


@pytest.mark.parametrize("group_size", [3, 20, rarely(1), rarely(8)])
def test_groups_of_query_heads(group_size: int) -> None:
    """Any number of query heads may share a KV head, including odd numbers and more than a tile of 16."""
    rows = [(50, 1), (40, 17)]
    assert_equals_reference(paged_batch(rows, num_heads=2 * group_size, num_kv_heads=2))


@pytest.mark.parametrize(
    ("window", "cap"),
    [(1, None), (70, 30.0), rarely(20, None), rarely(None, 5.0), rarely(1000, None)],
)
def test_window_and_cap(window: int | None, cap: float | None) -> None:
    """Sliding window and soft cap hold in decode, in chunks, and across the borders of key tiles."""
    assert_equals_reference(paged_batch([(200, 1), (150, 100), (10, 1)]), window, cap)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(20, torch.float32), (None, torch.float16), rarely(None, torch.float32)],
)
def test_sinks(window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has its sink once, even if several programs divide a row's keys, and in rows without keys."""
    monkeypatch.setattr(launch, "parts_of_keys", lambda *_: 3)
    sinks = torch.tensor([-2.0, 0.5, 3.0, 20.0])
    rows = [(600, 1), (0, 1), (3, 1), (150, 40), (10, 10)]
    batch = paged_batch(rows, num_heads=4, num_kv_heads=2, dtype=dtype)
    assert_equals_reference(batch, window, tolerance=1e-5 if dtype == torch.float32 else 4e-3, sinks=sinks)


def test_float16() -> None:
    """A 16-bit cache is read with 16-bit accuracy."""
    assert_equals_reference(paged_batch([(90, 1), (70, 30)], dtype=torch.float16), tolerance=4e-3)


def test_the_cache_may_have_another_dtype_than_the_query() -> None:
    """Queries in float32 may read a cache in float16."""
    batch = paged_batch([(90, 1), (70, 30)], dtype=torch.float16)
    wide = replace(batch, query=batch.query.float() + 1e-4)
    assert_equals_reference(wide)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_cache_is_read_exactly(dtype: torch.dtype) -> None:
    """The bytes and scales of a cache are read without a further loss, also with large and small values."""
    batch = paged_batch([(90, 1), (70, 30), (0, 1)])
    assert_equals_reference(with_quantised_cache(batch, dtype), tolerance=1e-5)
    assert_equals_reference(replace(with_quantised_cache(batch, dtype), query=batch.query.half()), tolerance=1e-3)
    small = replace(batch, k_cache=batch.k_cache * 1e-3, v_cache=batch.v_cache * 1e-3)
    assert_equals_reference(replace(with_quantised_cache(small, dtype), query=batch.query.half()), tolerance=1e-6)
    large = replace(batch, v_cache=batch.v_cache * 1e3)
    assert_equals_reference(replace(with_quantised_cache(large, dtype), query=batch.query.half()), tolerance=1.0)


def test_query_inside_a_packed_projection() -> None:
    """The query may be a strided view of a wider tensor."""
    batch = paged_batch([(90, 1), (70, 30)])
    packed = torch.cat([batch.query, torch.full_like(batch.query, torch.nan)], dim=1)
    view = packed[:, : batch.query.shape[1]]
    assert not view.is_contiguous()
    assert_equals_reference(replace(batch, query=view))


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_any_shape_gives_the_result_of_the_reference(data: st.DataObject) -> None:
    """Any mix of rows, heads, head dimensions, page sizes, windows and caps gives the reference's result."""
    contexts = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    rows = [(context, data.draw(st.integers(1, context) | st.just(1))) for context in contexts]
    num_kv_heads = data.draw(st.integers(1, 2))
    head_dim = data.draw(st.sampled_from([64, 72, 96, 128]))
    batch = paged_batch(
        rows,
        num_heads=num_kv_heads * data.draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=data.draw(st.sampled_from([8, 16, 24, 64])),
        seed=data.draw(st.integers(0, 1000)),
    )
    kind = data.draw(st.sampled_from([None, *quantised_types(head_dim)]))
    if kind is not None:
        batch = with_quantised_cache(batch, kind)
    window, cap = data.draw(st.none() | st.integers(1, 100)), data.draw(st.none() | st.just(9.0))
    assert_equals_reference(batch, window, cap)


@pytest.mark.parametrize("rows", [[(1, 1), (90, 1), (300, 1)], [(70, 33), (40, 1), (200, 65)]])
@pytest.mark.parametrize("window", [7, 40])
def test_blocks_in_front_of_a_window_are_not_read(rows: list[tuple[int, int]], window: int) -> None:
    """Decode and prefill give the same result if these blocks hold NaN."""
    batch = paged_batch(rows)
    released = with_released_blocks(batch, window)
    expected = paged_attention_reference(
        *as_float64(batch), scale=0.125, max_query_len=batch.max_query_len, sliding_window=window
    )
    result = paged_attention(*released.tensors, scale=0.125, max_query_len=batch.max_query_len, sliding_window=window)

    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
