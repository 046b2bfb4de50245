"""Self-test for one instruction set's kernels: products, attention, states and sampling must equal torch's results."""

from __future__ import annotations

import torch

from kernels import gguf
from kernels.kv_quantised import INT4, QUANTISED, from_quantised, to_quantised
from kernels.latent_attention_reference import latent_attention_reference
from kernels.linear import (
    PackedLinear,
    dequantised,
    empty_weight,
    linear_reference,
    pack,
    quantise,
    quantise_int4,
    quantised_linear_reference,
)
from kernels.native.attention import paged_attention_native
from kernels.native.latent import latent_attention_native
from kernels.native.library import Native
from kernels.native.recurrent import (
    convolve_native,
    convolve_tokens_native,
    delta_rule_native,
    selective_scan_native,
)
from kernels.native.sampling import argmax_native, sample_native
from kernels.paged_attention_reference import paged_attention_reference
from kernels.recurrent import (
    convolve_reference,
    convolve_tokens_reference,
    delta_rule_reference,
    selective_scan_reference,
)
from kernels.sampling_reference import SamplingTensors, sample_reference

_ROWS = (*range(1, 14), 17, 27)
"""Numbers of rows that cover every tile height of every level, alone and combined."""
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 2e-2, "int4": 2e-2}
"""Largest error relative to the largest result; bfloat16 also rounds activations, as int8 and int4 do to 8 bits."""
_ATTENTION = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.int8: 3e-2, torch.uint8: 3e-2, INT4: 3e-2}
"""Largest permitted error by KV type. Except with float32, chunks may round queries and attention weights to bfloat16.
"""


def failure(kernels: Native) -> str | None:
    """Return the level's first failure; None if it passes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(85, 72, generator=generator)
    int4 = quantise_int4(weight, kernels=kernels)
    for name, linear, exact, reference in (
        ("float32", _packed(kernels, weight), weight, linear_reference),
        ("bfloat16", _packed(kernels, weight.bfloat16()), weight.bfloat16(), linear_reference),
        ("int8", quantise(weight, kernels=kernels), weight, quantised_linear_reference),
        ("int4", int4, dequantised(int4), linear_reference),
    ):
        for rows in _ROWS:
            x = torch.randn(rows, 72, generator=generator)
            expected = reference(x.double(), exact.double())
            error = float((linear(x, kernels).double() - expected).abs().amax() / expected.abs().amax())
            if not error <= _TOLERANCE[name]:
                return f"a {name} matrix product of {rows} rows has an error of {error:.1e}"
    if (reason := _gguf_failure(kernels, generator)) is not None:
        return reason
    if (reason := _argmax_failure(kernels, generator) or _draw_failure(kernels, generator)) is not None:
        return reason
    for check in (_delta_rule_failure, _scan_failure, _convolution_failure):
        if (reason := check(kernels, generator)) is not None:
            return reason
    for dtype in _ATTENTION:
        reason = _attention_failure(kernels, generator, dtype) or _latent_failure(kernels, generator, dtype)
        if reason is not None:
            return reason
    return None


def _gguf_failure(kernels: Native, generator: torch.Generator) -> str | None:
    for kind, block_bytes in gguf.BLOCK_BYTES.items():
        inputs = 3 * gguf.block_inputs(kind)
        blocks = torch.randint(0, 256, (85, 3, block_bytes), dtype=torch.uint8, generator=generator)
        for at in gguf.scales_at(kind):  # float16 numbers from 1 to 2
            blocks[..., at + 1] = 0x3C
        linear, exact = gguf.pack(kind, blocks), gguf.dequantised(kind, blocks)
        for rows in (1, 2, 3, 4, 9):
            x = torch.randn(rows, inputs, generator=generator)
            expected = linear_reference(x.double(), exact.double())
            error = float((linear(x, kernels).double() - expected).abs().amax() / expected.abs().amax())
            if not error <= _TOLERANCE["int4"]:
                return f"a {kind} matrix product of {rows} rows has an error of {error:.1e}"
    return None


def _packed(kernels: Native, weight: torch.Tensor) -> PackedLinear:
    destination = empty_weight(weight.shape[0], weight.shape[1], weight.dtype)
    destination.copy_(weight)
    return pack(destination, kernels=kernels)


def _argmax_failure(kernels: Native, generator: torch.Generator) -> str | None:
    logits = torch.randn(3, 85, generator=generator)
    logits[2, 84] = torch.inf
    found = argmax_native(logits, kernels).tolist()
    expected = [*logits[:2].argmax(-1).tolist(), -1]
    return None if found == expected else f"argmax returned {found}, expected {expected}"


def _draw_failure(kernels: Native, generator: torch.Generator) -> str | None:
    rows = torch.arange(12)
    params = SamplingTensors(
        temperature=torch.full((12,), 0.8),
        top_k=(rows % 4 * 9).int(),
        top_p=1 - rows % 3 * 0.2,
        min_p=rows % 2 * 0.01,
        seed=rows << 33,
        choice=rows.int(),
        position=(rows * 3).int(),
        any_random=True,
        any_truncation=True,
    )
    logits = torch.randn(12, 85, generator=generator)
    found, expected = sample_native(logits, params, kernels).tolist(), sample_reference(logits, params).tolist()
    return None if found == expected else f"sampling returned {found}, expected {expected}"


def _delta_rule_failure(kernels: Native, generator: torch.Generator) -> str | None:
    query, key = torch.randn(2, 2, 3, 1, 20, generator=generator)
    value = torch.randn(2, 3, 2, 56, generator=generator)
    gate, beta = -torch.rand(2, 3, 2, generator=generator), torch.rand(2, 3, 2, generator=generator)
    state = torch.randn(2, 2, 20, 56, generator=generator)
    exact = state.double()
    expected = delta_rule_reference(query, key, value, gate, beta, exact, normalise=True)
    got = delta_rule_native(query, key, value, gate, beta, state, normalise=True, kernels=kernels)
    error = max(float((got.double() - expected).abs().amax()), float((state.double() - exact).abs().amax()))
    return (
        None
        if error <= _TOLERANCE["float32"] * float(exact.abs().amax())
        else f"a delta rule has an error of {error:.1e}"
    )


def _scan_failure(kernels: Native, generator: torch.Generator) -> str | None:
    x = torch.randn(2, 3, 2, 9, generator=generator)
    write, read = torch.randn(2, 2, 3, 1, 40, generator=generator)
    step, decay = torch.rand(2, 3, 2, generator=generator), -torch.rand(2, generator=generator)
    state = torch.randn(2, 2, 9, 40, generator=generator)
    exact = state.double()
    expected = selective_scan_reference(x, write, read, step, decay, x[0, 0, :, 0], exact)
    got = selective_scan_native(x, write, read, step, decay, x[0, 0, :, 0], state, kernels=kernels)
    error = max(float((got.double() - expected).abs().amax()), float((state.double() - exact).abs().amax()))
    return (
        None
        if error <= _TOLERANCE["float32"] * float(expected.abs().amax())
        else f"a selective scan has an error of {error:.1e}"
    )


def _convolution_failure(kernels: Native, generator: torch.Generator) -> str | None:
    x, weight = torch.randn(2, 40, generator=generator), torch.randn(40, 4, generator=generator)
    state = torch.randn(2, 40, 4, generator=generator)
    exact = state.clone()
    expected = convolve_reference(x, exact, weight, x[0], silu=True)
    got = convolve_native(x, state, weight, x[0], silu=True, kernels=kernels)
    error = max(float((got - expected).abs().amax()), float((state - exact).abs().amax()))
    tokens = torch.randn(1, 6, 40, generator=generator)
    expected = convolve_tokens_reference(tokens, weight, x[0], silu=True)
    got = convolve_tokens_native(tokens, weight, x[0], silu=True, kernels=kernels)
    error = max(error, float((got - expected).abs().amax()))
    return (
        None
        if error <= _TOLERANCE["float32"] * float(expected.abs().amax())
        else f"a convolution has an error of {error:.1e}"
    )


def _attention_failure(kernels: Native, generator: torch.Generator, dtype: torch.dtype) -> str | None:
    query = torch.randn(43, 4, 32, generator=generator)
    drawn = torch.randn(2, 5, 2, 16, 32, generator=generator)
    if dtype in QUANTISED:
        keys, values = to_quantised(drawn[0], dtype), to_quantised(drawn[1], dtype)
        exact_keys, exact_values = from_quantised(keys).double(), from_quantised(values).double()
    else:
        keys, values = drawn.to(dtype)
        exact_keys, exact_values = keys.double(), values.double()
    starts, contexts = torch.tensor([0, 1, 43], dtype=torch.int32), torch.tensor([37, 44], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 3], [0, 2, 1]], dtype=torch.int32)
    arguments = (tables, starts, contexts)
    expected = paged_attention_reference(
        query.double(), exact_keys, exact_values, *arguments, max_query_len=42, scale=0.2
    )
    got = paged_attention_native(query, keys, values, *arguments, scale=0.2, kernels=kernels)
    error = float((got.double() - expected).abs().amax())
    return None if error <= _ATTENTION[dtype] else f"attention over {dtype} has an error of {error:.1e}"


def _latent_failure(kernels: Native, generator: torch.Generator, dtype: torch.dtype) -> str | None:
    query, caches = torch.randn(21, 5, 96, generator=generator), torch.randn(2, 5, 1, 16, 64, generator=generator)
    latents, rotaries = caches[0], caches[1, ..., :32].contiguous()
    if dtype in QUANTISED:
        latents, rotaries = to_quantised(latents, dtype), to_quantised(rotaries, dtype)
        exact = from_quantised(latents).double(), from_quantised(rotaries).double()
    else:
        latents, rotaries = latents.to(dtype), rotaries.to(dtype)
        exact = latents.double(), rotaries.double()
    starts, contexts = torch.tensor([0, 1, 21], dtype=torch.int32), torch.tensor([37, 44], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 3], [0, 2, 1]], dtype=torch.int32)
    expected = latent_attention_reference(query.double(), *exact, tables, starts, contexts, scale=0.1)
    got = latent_attention_native(query, latents, rotaries, tables, starts, contexts, scale=0.1, kernels=kernels)
    error = float((got.double() - expected).abs().amax())
    return None if error <= _ATTENTION[dtype] else f"latent attention over {dtype} has an error of {error:.1e}"
