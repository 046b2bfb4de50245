"""The mixture of experts against its reference, expert by expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import fp8_linear, weight_only
from kernels._dispatch import Kernel
from kernels.activation import ClampedSwiglu
from kernels.experts import (
    ExpertLayers,
    ExpertWeights,
    mix_experts,
    mix_experts_reference,
    route,
    route_reference,
    sort_pairs,
)
from kernels.fp8_linear import Fp8Weight
from kernels.weight_only import Kind, Scales
from tests.examples import examples
from tests.kernels.interpreted import test_fp8_linear, test_weight_only


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_equals_its_reference(data: st.DataObject) -> None:
    """Any numbers of tokens and experts, sizes that are not multiples of a tile, and experts with none or many rows."""
    num_tokens, num_experts = data.draw(st.sampled_from([1, 2, 5, 40])), data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    hidden, intermediate = data.draw(st.sampled_from([(16, 16), (80, 136)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    renormalise = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(num_tokens, hidden).to(dtype)
    # Most rows go to one expert, whose rows fill several tiles. Some experts get no rows.
    logits = torch.randn(num_tokens, num_experts) + 4 * torch.eye(num_experts)[0] * data.draw(st.booleans())
    gate_up = (torch.randn(num_experts, 2 * intermediate, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5).to(dtype)

    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if data.draw(st.booleans()):
        biases = torch.randn(num_experts, 2 * intermediate).to(dtype), torch.randn(num_experts, hidden).to(dtype)
    clamped = data.draw(st.sampled_from([None, ClampedSwiglu(1.7, 1.5)]))

    layers = ExpertLayers(gate_up, down, *biases, clamped)
    ours = mix_experts(x, logits, layers, top_k=top_k, renormalise=renormalise)

    wide = ExpertLayers(gate_up.double(), down.double(), *biases, clamped)
    expected = mix_experts_reference(x.double(), logits.double(), wide, top_k=top_k, renormalise=renormalise)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


FORMS = {
    "int4": (Kind.INT4, 64, Scales.FLOAT),
    "int4 with zero points": (Kind.INT4, 32, Scales.FLOAT),
    "mxfp4": (Kind.FP4, 32, Scales.E8M0),
    "nvfp4": (Kind.FP4, 16, Scales.E4M3),
    "int8": (Kind.INT8, 0, Scales.FLOAT),
    "fp8, 16-bit activations": (Kind.FP8, 0, Scales.FLOAT),
}


def quantised_experts(form: str, count: int, outputs: int, inputs: int) -> ExpertWeights:
    """Return random weights of experts in a form."""
    if form in FORMS:
        kind, group, scale_type = FORMS[form]
        drawn = [
            test_weight_only.drawn(kind, outputs, inputs, group, zeros=form.endswith("points"), scale_type=scale_type)
            for _ in range(count)
        ]
        whole: ExpertWeights | None = weight_only.stack(drawn)
    else:
        block = (128, 128) if form == "fp8 in blocks" else (1, inputs)
        whole = fp8_linear.stack([test_fp8_linear.drawn(outputs, inputs, block) for _ in range(count)])
    assert whole is not None
    return whole


@pytest.mark.parametrize("form", [*FORMS, "fp8 in blocks", "fp8 by output"])
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_quantised_experts_equal_their_reference(form: str, num_tokens: int) -> None:
    """Each form, for few and many rows per expert, with biases and the clamped activation.

    An activation in the middle between two e4m3 codes may be rounded either way.
    """
    torch.manual_seed(0)
    count, top_k, hidden = 4, 2, 256
    intermediate = 128 if form.startswith("fp8 ") else 96
    layers = ExpertLayers(
        quantised_experts(form, count, 2 * intermediate, hidden),
        quantised_experts(form, count, hidden, intermediate),
        torch.randn(count, 2 * intermediate),
        torch.randn(count, hidden),
        ClampedSwiglu(1.7, 7.0) if num_tokens == 5 else None,
    )
    x, logits = torch.randn(num_tokens, hidden), torch.randn(num_tokens, count)

    ours = mix_experts(x, logits, layers, top_k=top_k, renormalise=True)

    expected = mix_experts_reference(x.double(), logits.double(), layers, top_k=top_k, renormalise=True)
    error = float((ours.double() - expected).norm() / expected.norm())
    assert error < (2e-2 if isinstance(layers.gate_up, Fp8Weight) else 1e-5)


def test_experts_of_different_forms_are_not_stacked() -> None:
    """Kinds and groups must be equal."""
    first = test_weight_only.drawn(Kind.INT4, 16, 128, 64, zeros=False)
    for other in (
        test_weight_only.drawn(Kind.INT4, 16, 128, 32, zeros=False),
        test_weight_only.drawn(Kind.INT4, 16, 128, 64, zeros=True),
        test_weight_only.drawn(Kind.FP4, 16, 128, 64, zeros=False),
    ):
        assert weight_only.stack([first, other]) is None
    blocks = [test_fp8_linear.drawn(128, 256, block) for block in ((128, 128), (1, 256))]
    assert fp8_linear.stack(blocks) is None


def test_a_token_is_computed_alike_in_every_batch() -> None:
    """Other tokens, which fill the tiles of the same experts, do not change a bit."""
    torch.manual_seed(0)
    x, logits = torch.randn(30, 32).half(), torch.randn(30, 4)
    gate_up, down = torch.randn(4, 32, 32).half(), torch.randn(4, 32, 16).half()
    layers = ExpertLayers(gate_up, down)
    together = mix_experts(x, logits, layers, top_k=2, renormalise=True)
    for keep in (slice(0, 20), slice(7, 29)):
        part = mix_experts(x[keep], logits[keep], layers, top_k=2, renormalise=True)

        assert torch.equal(part, together[keep])


def test_pairs_are_sorted_by_expert_and_then_by_token() -> None:
    """Each pair has one position; an expert's pairs are adjacent."""
    pairs = sort_pairs(torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32), 5)

    assert pairs.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert pairs.starts.tolist() == [0, 2, 2, 4, 6, 6]


@settings(max_examples=examples(10), deadline=None)
@given(st.sampled_from([1, 3, 700, 3000]), st.integers(1, 40), st.integers(1, 4), st.integers(0, 1000))
def test_any_number_of_pairs_is_sorted(num_tokens: int, num_experts: int, top_k: int, seed: int) -> None:
    """The order is that of a stable sort, for more pairs than a program reads at a time, and experts without any."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(num_experts, (num_tokens, top_k), generator=generator, dtype=torch.int32)

    pairs = sort_pairs(experts, num_experts)

    found, order = experts.flatten().sort(stable=True)
    assert torch.equal(pairs.order.long(), order)
    assert torch.equal(pairs.starts.long(), torch.searchsorted(found, torch.arange(num_experts + 1, dtype=torch.int32)))


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 3, 8, 60, 128]), st.data())
def test_routing_equals_its_reference(num_tokens: int, num_experts: int, data: st.DataObject) -> None:
    """Experts and their weights, for numbers of tokens and experts that do not fill a tile, and very small weights."""
    top_k, renormalise = data.draw(st.integers(1, min(8, num_experts))), data.draw(st.booleans())
    scale = data.draw(st.sampled_from([1.0, 60.0]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = scale * torch.randn(num_tokens, num_experts)

    weights, experts = route(logits, top_k, renormalise)

    expected_weights, expected = route_reference(logits, top_k, renormalise)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)
    differs = experts != expected
    assert bool((expected_weights[differs] < 1e-30).all()), "only experts without weight may be others"


def test_equal_logits_choose_the_first_experts() -> None:
    """Each expert is chosen once."""
    weights, experts = route(torch.zeros(2, 5), 3, True)

    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_leaves_the_others_alone(bad: float) -> None:
    """Its result is not finite, and the other tokens are computed as without it."""
    torch.manual_seed(0)
    layers = ExpertLayers(torch.randn(6, 64, 32), torch.randn(6, 32, 32))
    x, logits = torch.randn(3, 32), torch.randn(3, 6)
    expected = mix_experts(x, logits, layers, top_k=2, renormalise=True)
    logits[1] = bad

    found = mix_experts(x, logits, layers, top_k=2, renormalise=True)

    assert not bool(found[1].isfinite().any())
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("form", ["plain", "mxfp4", "int8", "fp8 in blocks"])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 128), (128, 1024)])
def test_inputs_are_divided_for_few_rows(form: str, hidden: int, inner: int) -> None:
    """With many inputs and few pairs, several programs share a product, with biases and factors."""
    torch.manual_seed(0)
    count = 3
    weights: list[ExpertWeights] = [
        torch.randn(count, outputs, inputs) / 32 if form == "plain" else quantised_experts(form, count, outputs, inputs)
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    ]
    layers = ExpertLayers(weights[0], weights[1], torch.randn(count, 2 * inner), torch.randn(count, hidden))
    x, logits = torch.randn(3, hidden), torch.randn(3, count)

    with counted_launches() as launched:
        together = mix_experts(x, logits, layers, top_k=2, renormalise=True)

    expected = mix_experts_reference(x, logits, layers, top_k=2, renormalise=True)
    error = float((together - expected).norm() / expected.norm())
    assert error < (2e-2 if form.startswith("fp8") else 1e-5)
    assert launched["add_splits_kernel"] == 1
    alone = mix_experts(x[1:2], logits[1:2], layers, top_k=2, renormalise=True)
    assert torch.equal(alone, together[1:2])


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count the launches of each kernel within the context."""
    found: Counter[str] = Counter()
    launch = Kernel.__getitem__

    def counted(self: Kernel, grid: Sequence[int]) -> Callable[..., None]:
        found[self.name] += 1
        return launch(self, grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__getitem__", counted)
        yield found
