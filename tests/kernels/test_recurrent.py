"""The native kernels of layers with recurrent state, against their definition and the functions of `transformers`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from kernels.native.library import Native, native_levels
from kernels.native.recurrent import convolve_native, delta_rule_native
from kernels.native.selftest import failure
from kernels.recurrent import (
    convolve_reference,
    delta_rule_reference,
    supports_convolution,
    supports_delta_rule,
)

LEVELS = pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Sizes(NamedTuple):
    """Sizes of a call of the delta rule."""

    rows: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


SIZES = [
    Sizes(16, 1, 2, 4, 128, 128),
    Sizes(1, 1, 1, 1, 16, 16),
    Sizes(3, 1, 2, 2, 24, 40),
    Sizes(2, 7, 1, 3, 20, 9),
    Sizes(1, 64, 2, 2, 32, 48),
    Sizes(2, 131, 1, 2, 32, 56),
]


class Arguments(NamedTuple):
    """Arguments of the delta rule."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor


def _arguments(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    """Return arguments whose queries, keys and values are parts of one tensor, as in the layers."""
    generator = torch.Generator().manual_seed(sum(sizes))
    rows, tokens, key_heads, value_heads, key_dim, value_dim = sizes
    widths = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    drawn = torch.randn(rows, tokens, sum(widths), generator=generator).to(dtype)
    query, key, value = torch.split(drawn, widths, dim=-1)
    return Arguments(
        query.reshape(rows, tokens, key_heads, key_dim),
        key.reshape(rows, tokens, key_heads, key_dim),
        value.reshape(rows, tokens, value_heads, value_dim),
        -torch.rand(rows, tokens, value_heads, generator=generator),
        torch.rand(rows, tokens, value_heads, generator=generator).to(dtype),
        torch.randn(rows, value_heads, key_dim, value_dim, generator=generator),
    )


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Assert that errors are small relative to the largest number."""
    assert float((found.double() - expected.double()).abs().max()) <= tolerance * float(expected.abs().max())


@LEVELS
@TYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_delta_rule_equals_its_definition(kernels: Native, dtype: torch.dtype, sizes: Sizes) -> None:
    """The output and the new state are those of float64, for one token and for several ones."""
    arguments = _arguments(sizes, dtype)
    assert supports_delta_rule(*arguments[:4], arguments.state)
    exact = arguments.state.double()
    expected = delta_rule_reference(*arguments[:5], exact, normalise=True)

    out = delta_rule_native(*arguments, normalise=True, kernels=kernels)

    assert out.dtype == dtype
    _assert_close(arguments.state, exact, 1e-5)
    _assert_close(out, expected, 1e-5 if dtype == torch.float32 else 5e-3)


@LEVELS
def test_the_delta_rule_without_norms_equals_its_definition(kernels: Native) -> None:
    """Short keys and queries are used as they are."""
    arguments = _arguments(Sizes(2, 5, 1, 2, 32, 32), torch.float32)
    short = arguments._replace(query=arguments.query * 0.1, key=arguments.key * 0.1)
    exact = short.state.double()
    expected = delta_rule_reference(*short[:5], exact, normalise=False)

    out = delta_rule_native(*short, normalise=False, kernels=kernels)

    _assert_close(short.state, exact, 1e-5)
    _assert_close(out, expected, 1e-5)


@LEVELS
@TYPES
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_the_delta_rule_equals_that_of_transformers(kernels: Native, dtype: torch.dtype, tokens: int) -> None:
    """One token equals the recurrent function, several ones the chunked function."""
    arguments = _arguments(Sizes(3, tokens, 2, 4, 32, 48), dtype)
    function = qwen3_next.torch_recurrent_gated_delta_rule if tokens == 1 else qwen3_next.torch_chunk_gated_delta_rule
    expected, state = function(
        *arguments[:5],
        initial_state=arguments.state.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )

    out = delta_rule_native(*arguments, normalise=True, kernels=kernels)

    _assert_close(arguments.state, state, 1e-5)
    _assert_close(out, expected, 1e-5 if dtype == torch.float32 else 1e-2)


@LEVELS
@TYPES
@pytest.mark.parametrize("tokens", [33, 70])
def test_a_prompt_in_two_parts_has_the_same_state(kernels: Native, dtype: torch.dtype, tokens: int) -> None:
    """A row's result does not depend on how its tokens are divided into steps, or on the other rows."""
    arguments = _arguments(Sizes(3, 80, 2, 4, 32, 48), dtype)
    state = arguments.state[1:2].clone()
    out = []
    for part in (slice(tokens), slice(tokens, None)):
        query, key, value, gate, beta = (each[1:2, part] for each in arguments[:5])
        out.append(delta_rule_native(query, key, value, gate, beta, state, normalise=True, kernels=kernels))

    whole = delta_rule_native(*arguments, normalise=True, kernels=kernels)

    assert torch.equal(whole[1:2], torch.cat(out, dim=1))
    assert torch.equal(arguments.state[1:2], state)


@LEVELS
@TYPES
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("channels", [16, 37, 4100])
@pytest.mark.parametrize("silu", [False, True])
def test_convolutions_equal_those_of_torch(
    kernels: Native, dtype: torch.dtype, width: int, channels: int, silu: bool
) -> None:
    """The outputs are rounded as those of the function of `transformers`, and the states are equal."""
    generator = torch.Generator().manual_seed(channels + width)
    x = torch.randn(3, 2 * channels, generator=generator).to(dtype)[:, channels:]
    state = torch.randn(3, channels, width, generator=generator).to(dtype)
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if width % 2 else None
    assert supports_convolution(x, state, weight)
    theirs, ours = state.clone(), state.clone()
    expected = qwen3_next.causal_conv1d_update(x[:, :, None], theirs, weight, bias, "silu" if silu else None)[:, :, 0]
    defined = convolve_reference(x, ours, weight, bias, silu=silu)

    out = convolve_native(x, state, weight, bias, silu=silu, kernels=kernels)

    assert torch.equal(state, theirs)
    assert torch.equal(state, ours)
    for reference in (expected, defined):
        # Sums near zero have large relative errors.
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(out, reference, rtol=4 * rounding, atol=8 * torch.finfo(torch.float32).eps)
        if dtype == torch.bfloat16:
            assert int((out != reference).sum()) <= 0.01 * out.numel() + 1


@LEVELS
def test_the_self_test_finds_a_wrong_state(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level whose delta rule or convolution is wrong is not used."""
    assert failure(kernels) is None
    for name, message in (("delta_rule_native", "delta rule"), ("convolve_native", "convolution")):
        with monkeypatch.context() as patch:
            right = {"delta_rule_native": delta_rule_native, "convolve_native": convolve_native}[name]

            def wrong(*arguments: torch.Tensor, right=right, **settings: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return right(*arguments, **settings) * 1.1  # type: ignore[no-any-return]

            patch.setattr(f"kernels.native.selftest.{name}", wrong)
            assert message in (failure(kernels) or "")
