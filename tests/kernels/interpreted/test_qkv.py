"""The fused norm, rotation and KV write against the operations it consists of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_quantised import INT4, cached_size, from_cache
from kernels.norm import rms_norm_reference
from kernels.qkv import rotate_and_cache
from kernels.rotary import apply_rotary_reference
from tests.examples import examples
from tests.kernels.batches import quantised_types


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_equals_its_parts(data: st.DataObject) -> None:
    """Any head counts, head and rotary dimensions, page sizes and cache types, with and without norms and slots."""
    num_tokens, num_heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    num_kv_heads = data.draw(st.integers(1, 3))
    head_dim, half = data.draw(st.sampled_from([(16, 8), (64, 32), (80, 40), (80, 16), (96, 48)]))
    block_size = data.draw(st.sampled_from([8, 16, 24]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    kv_dtype = data.draw(st.sampled_from([dtype, *quantised_types(head_dim)]))
    normed = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    angle = torch.randn(num_tokens, half)
    norms = torch.rand(2, head_dim).to(dtype) if normed else (None, None)
    slots = torch.randperm(3 * block_size)[:num_tokens]
    slots[data.draw(st.integers(0, num_tokens - 1))] = -1
    caches = torch.zeros(2, 3, num_kv_heads, block_size, cached_size(head_dim, kv_dtype)).to(kv_dtype)

    query = rotate_and_cache(qkv, norms[0], norms[1], 1e-5, angle.cos(), angle.sin(), caches[0], caches[1], slots)

    heads = qkv.view(num_tokens, -1, head_dim)
    expected, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        expected, key = rms_norm_reference(expected, norms[0], 1e-5), rms_norm_reference(key, norms[1], 1e-5)
    expected, key = apply_rotary_reference(expected, key, angle.cos(), angle.sin())
    # Summing in another order may change the rounding, including the rounding to eight bits.
    step = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(query, expected, rtol=step, atol=step)
    for cache, written in zip(caches, (key, value), strict=True):
        read = from_cache(cache, torch.float32)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                exact, found = written[token].float(), read[slot // block_size, :, slot % block_size]
                # int8 and int4 round relative to the largest element, fp8 relative to each element.
                shares = {torch.int8: (step, 0.005), torch.uint8: (0.07, 0.002), INT4: (step, 0.07)}
                relative, share = shares.get(kv_dtype, (step, 0.0))
                allowed = step + relative * exact.abs() + share * exact.abs().amax(-1, keepdim=True)
                assert bool(((found - exact).abs() <= allowed).all())
                read[slot // block_size, :, slot % block_size] = 0
        assert not read.any(), "only the slots named are written"
