"""The native kernels of layers with recurrent state, against their definition and the functions of `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from kernels.native.library import Native, native_levels, set_num_threads
from kernels.native.recurrent import (
    convolve_native,
    convolve_tokens_native,
    delta_rule_native,
    selective_scan_native,
)
from kernels.native.selftest import failure
from kernels.recurrent import (
    convolve_reference,
    convolve_tokens_reference,
    delta_rule_reference,
    selective_scan_reference,
    supports_convolution,
    supports_delta_rule,
    supports_selective_scan,
)

LEVELS = pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


_Rule = Callable[[torch.Tensor], torch.Tensor]


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
    Sizes(17, 1, 1, 1, 1, 1),
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
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("channels", [1, 16, 37, 4100])
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


class Scan(NamedTuple):
    """Arguments of the selective scan."""

    x: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor
    step: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    state: torch.Tensor


def _scan(sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> Scan:
    """Return arguments for rows, tokens, heads, groups, head_dim and state_dim; the first three are parts of one."""
    rows, tokens, heads, groups, head_dim, state_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    widths = [heads * head_dim, groups * state_dim, groups * state_dim]
    drawn = torch.randn(rows, tokens, sum(widths), generator=generator).to(dtype)
    x, write, read = torch.split(drawn, widths, dim=-1)
    return Scan(
        x.view(rows, tokens, heads, head_dim),
        write.view(rows, tokens, groups, state_dim),
        read.view(rows, tokens, groups, state_dim),
        torch.rand(rows, tokens, heads, generator=generator),
        -torch.rand(heads, generator=generator) * 4,
        torch.randn(heads, generator=generator),
        torch.randn(rows, heads, head_dim, state_dim, generator=generator),
    )


@LEVELS
@TYPES
@pytest.mark.parametrize(
    "sizes",
    [
        *((16, 1, 4, 1, 64, 128), (1, 1, 1, 1, 1, 1), (3, 1, 6, 3, 9, 20), (17, 1, 2, 2, 7, 16), (0, 1, 2, 1, 8, 16)),
        *((2, 0, 2, 1, 8, 16), (1, 64, 2, 1, 32, 48), (2, 131, 4, 2, 6, 17), (1, 70, 1, 1, 4, 33)),
    ],
    ids=str,
)
def test_the_selective_scan_equals_its_definition(
    kernels: Native, dtype: torch.dtype, sizes: tuple[int, int, int, int, int, int]
) -> None:
    """The output and the new state are those of float64, for all sizes, also without rows or tokens."""
    arguments = _scan(sizes, dtype)
    assert supports_selective_scan(*arguments[:3], arguments.state)
    exact = arguments.state.double()
    expected = selective_scan_reference(*arguments[:6], exact)

    out = selective_scan_native(*arguments, out_dtype=torch.float32, kernels=kernels)

    torch.testing.assert_close(arguments.state.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@LEVELS
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_selective_scan_equals_that_of_transformers(kernels: Native, tokens: int) -> None:
    """One token equals the step function, several ones the chunked function."""
    arguments = _scan((3, tokens, 4, 2, 8, 16), torch.float32)
    x, write, read, step, decay, skip, state = arguments
    if tokens == 1:
        theirs = state.clone()
        expected = mamba2.mamba2_selective_state_update(
            *(theirs, x[:, 0], step[:, 0, :, None].expand(-1, -1, 8), decay[:, None, None].expand(-1, 8, 16)),
            *(write[:, 0], read[:, 0], skip[:, None].expand(-1, 8)),
        )[:, None]
    else:
        expected, theirs = mamba2.mamba2_chunk_scan(
            *(x, step, decay, write, read), 32, D=skip, initial_states=state, return_final_states=True
        )

    out = selective_scan_native(*arguments, kernels=kernels)

    _assert_close(state, theirs, 1e-5)
    _assert_close(out, expected, 1e-5)


@LEVELS
@TYPES
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("rows", "tokens", "channels"), [(2, 1, 16), (1, 3, 37), (3, 70, 33), (1, 0, 16), (0, 2, 16)])
@pytest.mark.parametrize("silu", [False, True])
def test_convolutions_of_many_tokens_equal_those_of_torch(
    kernels: Native, dtype: torch.dtype, width: int, rows: int, tokens: int, channels: int, silu: bool
) -> None:
    """Tokens before the first count as 0; the outputs are rounded as in the function of `transformers`."""
    generator = torch.Generator().manual_seed(channels + width)
    x = torch.randn(rows, tokens, 2 * channels, generator=generator).to(dtype)[:, :, channels:]
    weight = torch.randn(channels, width, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if width % 2 else None
    assert supports_convolution(x, None, weight)
    references = [convolve_tokens_reference(x, weight, bias, silu=silu)]
    if rows and tokens:
        activation = "silu" if silu else None
        theirs = qwen3_next.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation=activation)
        references.append(theirs.transpose(1, 2))

    out = convolve_tokens_native(x, weight, bias, silu=silu, kernels=kernels)

    rounding = torch.finfo(dtype).eps
    for reference in references:
        torch.testing.assert_close(out, reference, rtol=4 * rounding, atol=16 * torch.finfo(torch.float32).eps)


@LEVELS
@pytest.mark.parametrize("threads", [1, 2])
def test_states_are_updated_where_they_are(kernels: Native, threads: int) -> None:
    """With places, only the states of the rows change, and to what they become without places."""
    places = torch.tensor([4, 0, 3])
    rule, scan = _arguments(Sizes(3, 2, 1, 2, 20, 9), torch.float32), _scan((3, 2, 2, 1, 5, 20), torch.float32)
    x, weight = torch.randn(3, 37), torch.randn(37, 3)
    calls = {
        "rule": lambda state, places: delta_rule_native(
            *rule[:5], state, places=places, normalise=True, kernels=kernels
        ),
        "scan": lambda state, places: selective_scan_native(*scan[:6], state, places=places, kernels=kernels),
        "convolution": lambda state, places: convolve_native(
            x, state, weight, None, places=places, silu=True, kernels=kernels
        ),
    }
    set_num_threads(threads)
    for name, shape in (("rule", rule.state.shape[1:]), ("scan", scan.state.shape[1:]), ("convolution", weight.shape)):
        states = torch.randn(6, *shape)
        before, rows = states.clone(), states[places]
        expected = calls[name](rows, None)

        assert torch.equal(calls[name](states, places), expected), name
        assert torch.equal(states[places], rows), name
        others = [1, 2, 5]
        assert torch.equal(states[others], before[others]), name


@LEVELS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_stay_in_their_row(kernels: Native, value: float) -> None:
    """A state with NaN or infinity gives what the definition gives, and does not change other rows."""
    rule, scan = _arguments(Sizes(2, 3, 1, 2, 20, 24), torch.float32), _scan((2, 3, 2, 1, 5, 20), torch.float32)
    cases: list[tuple[torch.Tensor, _Rule, _Rule]] = [
        (
            rule.state,
            lambda state: delta_rule_reference(*rule[:5], state, normalise=True),
            lambda state: delta_rule_native(*rule[:5], state, normalise=True, kernels=kernels),
        ),
        (
            scan.state,
            lambda state: selective_scan_reference(*scan[:6], state),
            lambda state: selective_scan_native(*scan[:6], state, kernels=kernels),
        ),
    ]
    for state, definition, kernel in cases:
        state[0, 1, 2, 3] = value
        exact = state.double()
        expected, out = definition(exact), kernel(state)
        assert torch.equal(out.isfinite(), expected.isfinite())
        assert torch.equal(state.isfinite(), exact.isfinite())
        assert bool(out[1].isfinite().all())
        torch.testing.assert_close(out[1].double(), expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.every(3)
def test_a_long_sequence_keeps_its_precision() -> None:
    """After more than 2 to the power of 16 tokens, output and state are those of float64."""
    tokens = (1 << 16) + 3
    rule, scan = _arguments(Sizes(1, tokens, 1, 1, 8, 8), torch.float32), _scan((1, tokens, 1, 1, 4, 8), torch.float32)
    exact_rule, exact_scan = rule.state.double(), scan.state.double()
    expected_rule = delta_rule_reference(*rule[:5], exact_rule, normalise=True)
    expected_scan = selective_scan_reference(*scan[:6], exact_scan)

    for kernels in native_levels():
        state = rule.state.clone()
        _assert_close(delta_rule_native(*rule[:5], state, normalise=True, kernels=kernels), expected_rule, 1e-5)
        _assert_close(state, exact_rule, 1e-5)
        state = scan.state.clone()
        _assert_close(selective_scan_native(*scan[:6], state, kernels=kernels), expected_scan, 1e-5)
        _assert_close(state, exact_scan, 1e-5)


@LEVELS
def test_states_of_another_layout_are_refused(kernels: Native) -> None:
    """The kernels write to the state, so they use no copy of it."""
    rule, scan = _arguments(Sizes(2, 1, 1, 1, 8, 16), torch.float32), _scan((2, 1, 1, 1, 8, 16), torch.float32)
    turned = rule.state.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match=r"state: .* is not a contiguous \[states, 1, 8, 16\] torch.float32"):
        delta_rule_native(*rule[:5], turned, normalise=True, kernels=kernels)
    with pytest.raises(ValueError, match=r"state: .* is not a contiguous"):
        selective_scan_native(*scan[:6], scan.state.double(), kernels=kernels)
    with pytest.raises(ValueError, match="state: it has 1 states for 2 rows"):
        selective_scan_native(*scan[:6], scan.state[:1], kernels=kernels)
    with pytest.raises(ValueError, match=r"places: \[1\] torch.int64 is not a contiguous \[2\] int64"):
        selective_scan_native(*scan, places=torch.tensor([0]), kernels=kernels)
    with pytest.raises(ValueError, match=r"state: .* is not a contiguous"):
        convolve_native(torch.ones(2, 8), torch.ones(2, 8, 3), torch.ones(8, 4), None, silu=True, kernels=kernels)


@LEVELS
def test_the_self_test_finds_a_wrong_state(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level with a wrong kernel is not used."""
    assert failure(kernels) is None
    for right_one, message in (
        (delta_rule_native, "delta rule"),
        (selective_scan_native, "selective scan"),
        (convolve_native, "convolution"),
        (convolve_tokens_native, "convolution"),
    ):
        with monkeypatch.context() as patch:

            def wrong(*arguments: torch.Tensor, right=right_one, **settings: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return right(*arguments, **settings) * 1.1  # type: ignore[no-any-return]

            patch.setattr(f"kernels.native.selftest.{right_one.__name__}", wrong)
            assert message in (failure(kernels) or "")
