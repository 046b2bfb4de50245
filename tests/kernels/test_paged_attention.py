"""Paged attention: the reference against torch's dense SDPA, the CPU path against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_quantised import INT4, QUANTISED, parts_of
from kernels.native.attention import paged_attention_native
from kernels.native.library import Native, native_levels
from kernels.paged_attention import paged_attention, paged_attention_reference
from tests.examples import examples
from tests.kernels.batches import PagedBatch, as_float64, head_dims, paged_batch, with_released_blocks

DECODE = [(1, 1), (16, 1), (17, 1), (300, 1)]
MIXED = [(5, 5), (33, 1), (100, 40), (300, 1), (64, 64), (31, 2)]


def reference(
    batch: PagedBatch, window: int | None = None, cap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the result of the reference in float64."""
    options = {"max_query_len": batch.max_query_len, "sliding_window": window, "soft_cap": cap, "sinks": sinks}
    return paged_attention_reference(*as_float64(batch), scale=0.125, **options)  # type: ignore[arg-type]


def on_cpu(
    batch: PagedBatch, window: int | None = None, cap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the result of the CPU path."""
    options = {"max_query_len": batch.max_query_len, "sliding_window": window, "soft_cap": cap, "sinks": sinks}
    return paged_attention(*batch.tensors, scale=0.125, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 7, 32])
def test_reference_is_dense_attention(window: int | None) -> None:
    """Without a cap, each row's result is torch's dense attention over that row's own keys."""
    batch = paged_batch(MIXED, dtype=torch.float64)
    expected = []
    for row, (keys, values) in enumerate(batch.dense):
        context = keys.shape[1]
        query = batch.query[batch.query_start[row] : batch.query_start[row + 1]].transpose(0, 1)
        mask = torch.ones(query.shape[1], context, dtype=torch.bool).tril(context - query.shape[1])
        if window is not None:
            mask &= ~mask.new_ones(mask.shape).tril(context - query.shape[1] - window)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=0.125, enable_gqa=True
        )
        expected.append(attended[0].transpose(0, 1))

    torch.testing.assert_close(reference(batch, window), torch.cat(expected), rtol=1e-10, atol=1e-10)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_level_of_the_cpu_kernels_equals_the_reference(data: st.DataObject) -> None:
    """Decode rows, chunks long and short, windows, caps, sinks and each type of cache, at each level that runs here."""
    levels = native_levels()
    if not levels:
        pytest.skip("built without a compiler: torch computes")
    contexts = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    rows = [(context, data.draw(st.integers(1, context) | st.just(1))) for context in contexts]
    num_kv_heads = data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, *QUANTISED]))
    batch = paged_batch(
        rows,
        num_heads=num_kv_heads * data.draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from(head_dims(dtype))),
        block_size=data.draw(st.sampled_from([8, 16, 24, 128])),
        dtype=dtype,
        seed=data.draw(st.integers(0, 1000)),
    )
    window, cap = data.draw(st.none() | st.integers(1, 300)), data.draw(st.sampled_from([None, 30.0]))
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 30, batch.query.shape[1])]))
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(torch.bfloat16).eps

    kernels = data.draw(st.sampled_from(levels))
    out = paged_attention_native(
        *batch.tensors, kernels=kernels, scale=0.125, sliding_window=window, soft_cap=cap, sinks=sinks
    )

    torch.testing.assert_close(out.double(), reference(batch, window, cap, sinks), rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_a_few_tokens_have_the_bits_of_each_alone(data: st.DataObject) -> None:
    """A row with up to 11 tokens, such as drafts, gives each the bits that it has alone, at each level that runs here.

    So tokens do not depend on the drafts beside them, not even on those whose keys or values are not finite.
    """
    levels = native_levels()
    if not levels:
        pytest.skip("built without a compiler: torch computes")
    tokens = data.draw(st.integers(2, 11))
    context = tokens + data.draw(st.integers(0, 400))
    num_kv_heads = data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, *QUANTISED]))
    batch = paged_batch(
        [(context, tokens)],
        num_heads=num_kv_heads * data.draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from(head_dims(dtype))),
        block_size=data.draw(st.sampled_from([8, 16, 24, 128])),
        dtype=dtype,
        seed=data.draw(st.integers(0, 1000)),
    )
    cap, window = data.draw(st.sampled_from([None, 30.0])), data.draw(st.sampled_from([None, context, 500 + context]))
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 30, batch.query.shape[1])]))
    kernels = data.draw(st.sampled_from(levels))
    query, k_cache, v_cache, block_tables = batch.tensors[:4]
    finite = tokens
    if data.draw(st.booleans()):
        block_size, last = k_cache.shape[2], context - 1
        finite = tokens - 1
        for cache in (k_cache, v_cache):
            numbers = parts_of(cache)[1] if dtype in QUANTISED else cache
            numbers[block_tables[0, last // block_size], :, last % block_size] = torch.nan

    def attend(first: int, end: int) -> torch.Tensor:
        return paged_attention_native(
            query[first:end],
            k_cache,
            v_cache,
            block_tables,
            torch.tensor([0, end - first], dtype=torch.int32),
            torch.tensor([context - tokens + end], dtype=torch.int32),
            kernels=kernels,
            scale=0.125,
            sliding_window=window,
            soft_cap=cap,
            sinks=sinks,
        )

    together = attend(0, tokens)

    assert torch.equal(together[:finite], torch.cat([attend(i, i + 1) for i in range(finite)]))
    assert together[finite:].isnan().all()


@pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
def test_decode_over_int4_rounds_queries_and_weights_to_sixteen_bits(kernels: Native, sharpness: float) -> None:
    """The weights of a row may be nearly equal, or one may be many times as large as all others together."""
    batch = paged_batch([(2500, 1), (700, 5), (1, 1)], num_heads=7, num_kv_heads=1, head_dim=96, dtype=INT4)
    query = batch.query * sharpness
    expected = paged_attention_reference(query.double(), *as_float64(batch)[1:], max_query_len=5, scale=0.5)

    got = paged_attention_native(query, *batch.tensors[1:], kernels=kernels, scale=0.5)

    torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-3)


@pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
@pytest.mark.parametrize("part", [0, 1], ids=["scale", "zero"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_number_of_int4_that_is_not_finite_fails(kernels: Native, part: int, number: float) -> None:
    """So does no other row, whether the number belongs to a key or to a value."""
    for cache in (1, 2):
        batch = paged_batch([(40, 1), (45, 1)], dtype=INT4)
        parts_of(batch.tensors[cache])[1][batch.block_tables[0, 1], :, 3, :, part] = number
        out = paged_attention_native(*batch.tensors, kernels=kernels, scale=0.125)

        assert not out[0].isfinite().any()
        torch.testing.assert_close(out[1].double(), reference(batch)[1], rtol=3e-3, atol=3e-3)


def test_soft_cap_squashes_the_logits_before_the_mask() -> None:
    """A soft cap c replaces each scaled logit x by c * tanh(x / c), as Gemma 2 does, and nothing else."""
    batch = paged_batch([(20, 1)], num_heads=1, num_kv_heads=1, dtype=torch.float64)
    keys, values = batch.dense[0][0][0], batch.dense[0][1][0]
    logits = 2.0 * torch.tanh((keys @ batch.query[0, 0]) * 0.125 / 2.0)
    expected = logits.softmax(0) @ values

    torch.testing.assert_close(reference(batch, cap=2.0)[0, 0], expected)


def test_a_sink_takes_a_share_of_the_weights_and_has_no_value() -> None:
    """A head's softmax has one additional logit, its sink, whose weight goes to no value."""
    batch = paged_batch([(20, 1)], num_heads=1, num_kv_heads=1, dtype=torch.float64)
    keys, values = batch.dense[0][0][0], batch.dense[0][1][0]
    sink = torch.tensor([1.5])
    logits = torch.cat(((keys @ batch.query[0, 0]) * 0.125, sink.double()))

    torch.testing.assert_close(reference(batch, sinks=sink)[0, 0], logits.softmax(0)[:20] @ values)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_on_the_cpu_path(window: int | None) -> None:
    """Decode rows and chunks with one sink per head, one of which exceeds all scores."""
    batch = paged_batch(MIXED)
    sinks = torch.linspace(-3, 30, batch.query.shape[1])

    torch.testing.assert_close(
        on_cpu(batch, window, None, sinks), reference(batch, window, None, sinks).float(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_cpu_path_equals_reference(rows: list[tuple[int, int]], window: int | None, cap: float | None) -> None:
    """The CPU path agrees with the reference, whatever the unused slots of the pages contain."""
    batch = paged_batch(rows)

    torch.testing.assert_close(on_cpu(batch, window, cap), reference(batch, window, cap).float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_cpu_path_equals_reference_for_any_shape(data: st.DataObject) -> None:
    """Any mix of rows, head counts, head dimensions, page sizes and windows gives the reference's result."""
    contexts = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=6))
    rows = [(context, data.draw(st.integers(1, context) | st.just(1))) for context in contexts]
    num_kv_heads = data.draw(st.integers(1, 3))
    batch = paged_batch(
        rows,
        num_heads=num_kv_heads * data.draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([64, 80, 96])),
        block_size=data.draw(st.sampled_from([8, 16, 24, 128])),
        seed=data.draw(st.integers(0, 1000)),
    )
    window = data.draw(st.none() | st.integers(1, 100))

    torch.testing.assert_close(on_cpu(batch, window), reference(batch, window).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cpu_path_keeps_16_bit_accuracy(dtype: torch.dtype) -> None:
    """With 16-bit queries and cache the result is within the dtype's rounding of the exact one."""
    batch = paged_batch(MIXED, dtype=dtype)
    eps = torch.finfo(dtype).eps

    torch.testing.assert_close(on_cpu(batch).double(), reference(batch), rtol=4 * eps, atol=4 * eps)


def test_long_chunk_after_a_prefix() -> None:
    """A chunk longer than one query tile attends only to its prefix and to earlier tokens in the chunk."""
    batch = paged_batch([(700, 600)], block_size=32)

    torch.testing.assert_close(on_cpu(batch), reference(batch).float(), rtol=1e-5, atol=1e-5)


def test_many_decode_rows_are_split_and_put_back_in_order() -> None:
    """Rows with very different lengths are computed in several groups, and each result returns to its row's place."""
    batch = paged_batch([(1 + 37 * row % 1200, 1) for row in range(40)], num_heads=8, num_kv_heads=8)

    torch.testing.assert_close(on_cpu(batch), reference(batch).float(), rtol=1e-5, atol=1e-5)


def test_padding_rows_are_zero() -> None:
    """A row with context 0 gets zeros and disturbs no other."""
    batch = paged_batch([(0, 1), (9, 1), (0, 1)])
    out = on_cpu(batch)

    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    torch.testing.assert_close(out[1], reference(batch)[1].float(), rtol=1e-5, atol=1e-5)


def test_a_failed_rows_nan_stays_its_own() -> None:
    """NaN in one row's keys makes that row NaN and does not affect the others."""
    batch = paged_batch([(40, 1), (45, 1)])
    batch.k_cache[batch.block_tables[0, 0]] = torch.nan
    out = on_cpu(batch)

    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], reference(batch)[1].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 32, 65])
@pytest.mark.parametrize("rows", [DECODE, MIXED, [(300, 90)]])
def test_blocks_in_front_of_a_window_are_not_read(rows: list[tuple[int, int]], window: int) -> None:
    """The reference, the torch path and each native level give the same result if these blocks hold NaN."""
    batch = paged_batch(rows)
    released = with_released_blocks(batch, window)
    expected = reference(batch, window)
    results = [reference(released, window), on_cpu(released, window)]
    results += [
        paged_attention_native(*released.tensors, kernels=kernels, scale=0.125, sliding_window=window)
        for kernels in native_levels()
    ]

    assert not torch.equal(batch.block_tables, released.block_tables)
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
