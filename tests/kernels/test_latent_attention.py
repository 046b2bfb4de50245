"""Latent attention: the reference against dense attention, the CPU paths against the reference, bytes read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_quantised import INT4, QUANTISED, parts_of
from kernels.latent_attention import HeadProjections, latent_attention, latent_attention_reference
from kernels.native.latent import head_products_native, latent_attention_native, pack_heads
from kernels.native.library import Native, native_levels
from tests.examples import examples
from tests.kernels.latent_batches import latent_batch

MIXED = [(5, 5), (33, 1), (100, 40), (300, 1), (64, 64), (31, 2)]


def levels() -> tuple[Native, ...]:
    """Return the levels of the native kernels that run here."""
    found = native_levels()
    if not found:
        pytest.skip("built without a compiler: torch computes")
    return found


def test_absorbed_attention_is_attention_over_expanded_keys_and_values() -> None:
    """With projections, the result is dense attention over the keys and values of each head."""
    heads, key_dim, value_dim, rank = 4, 24, 16, 64
    batch = latent_batch([(21, 21)], num_heads=heads, rank=rank, dtype=torch.float64)
    weight = torch.randn(heads * (key_dim + value_dim), rank, dtype=torch.float64)
    query = torch.randn(21, heads, key_dim + 32, dtype=torch.float64)
    slots = batch.block_tables[0, :2].long()
    latents, rotary = (cache[slots, 0].flatten(0, 1)[:21] for cache in (batch.latent_cache, batch.rotary_cache))
    expanded = (latents @ weight.T).view(21, heads, key_dim + value_dim).transpose(0, 1)
    keys = torch.cat((expanded[..., :key_dim], rotary.expand(heads, -1, -1)), -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, expanded[..., key_dim:], is_causal=True, scale=0.1
    ).transpose(0, 1)

    projections = HeadProjections.of(weight, heads, value_dim)
    attended = latent_attention_reference(projections.absorb(query), *batch.tensors[1:], scale=0.1)
    got = projections.values_of(attended, torch.float64)

    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_every_level_of_the_cpu_kernels_equals_the_reference(data: st.DataObject) -> None:
    """Decode rows, chunks long and short, padding and each type of cache, at each level that runs here."""
    kernels = data.draw(st.sampled_from(levels()))
    contexts = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    rows = [(context, data.draw(st.integers(1, min(context, 60)) | st.just(1))) for context in contexts]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, *QUANTISED]))
    batch = latent_batch(
        rows,
        num_heads=data.draw(st.integers(1, 19)),
        rank=data.draw(st.sampled_from([32, 96] if dtype == INT4 else [16, 48, 96])),
        rotary_dim=data.draw(st.sampled_from([32, 64] if dtype == INT4 else [16, 32])),
        block_size=data.draw(st.sampled_from([8, 16, 24, 128])),
        dtype=dtype,
        seed=data.draw(st.integers(0, 1000)),
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(torch.bfloat16).eps

    got = latent_attention_native(*batch.tensors, scale=0.1, kernels=kernels)

    expected = latent_attention_reference(*batch.exact, scale=0.1)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_a_few_tokens_have_the_bits_of_each_alone(data: st.DataObject) -> None:
    """A row with up to 11 tokens, such as drafts, gives each the bits that it has alone.

    This holds even if the latent vector of a later token is not finite.
    """
    kernels = data.draw(st.sampled_from(levels()))
    tokens = data.draw(st.integers(2, 11))
    context = tokens + data.draw(st.integers(0, 700))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, *QUANTISED]))
    batch = latent_batch([(context, tokens)], num_heads=data.draw(st.integers(1, 7)), dtype=dtype)
    finite = tokens
    if data.draw(st.booleans()):
        finite = tokens - 1
        cache = batch.latent_cache
        numbers = parts_of(cache)[1] if dtype in QUANTISED else cache
        last = context - 1
        numbers[batch.block_tables[0, last // 16], 0, last % 16] = torch.nan

    together = latent_attention_native(*batch.tensors, scale=0.1, kernels=kernels)

    for token in range(finite):
        alone = latent_attention_native(
            batch.query[token : token + 1],
            batch.latent_cache,
            batch.rotary_cache,
            batch.block_tables,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([context - tokens + 1 + token], dtype=torch.int32),
            scale=0.1,
            kernels=kernels,
        )
        assert torch.equal(together[token], alone[0])


def test_a_row_without_keys_has_result_zero() -> None:
    """Padding in a captured graph gives zeros, also between other rows."""
    batch = latent_batch([(40, 1), (9, 1), (600, 1)])
    batch.context_lens[1] = 0

    got = latent_attention(*batch.tensors, max_query_len=1, scale=0.1)

    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert bool(got[0].isfinite().all() and got[2].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_per_head_equal_the_reference(dtype: torch.dtype) -> None:
    """Each level multiplies each head by its matrix, and keeps the other elements."""
    weights = torch.randn(5, 48, 32).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for kernels in levels():
        packed = pack_heads(weights, kernels=kernels)
        assert packed is not None
        for tokens in (1, 3, 13, 40):
            x = torch.randn(tokens, 5, 40)
            got = head_products_native(x, packed, keep_rest=True)
            expected = torch.einsum("nhi,hoi->nho", x[..., :32].double(), weights.double())
            torch.testing.assert_close(got[..., :48].double(), expected, rtol=tolerance, atol=6 * tolerance)
            assert torch.equal(got[..., 48:], x[..., 32:])


def test_packed_projections_equal_the_unpacked_ones() -> None:
    """A layer's projections give the same results before and after packing."""
    levels()
    weight = torch.randn(3 * 48, 64)
    projections = HeadProjections.of(weight, 3, 16)
    packed = projections.for_serving()
    query, attended = torch.randn(5, 3, 32 + 16), torch.randn(5, 3, 64)

    torch.testing.assert_close(packed.absorb(query), projections.absorb(query), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        packed.values_of(attended, torch.float32), projections.values_of(attended, torch.float32), rtol=1e-5, atol=1e-4
    )
