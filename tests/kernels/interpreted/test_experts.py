"""The mixture of experts against its reference, expert by expert."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.experts import mix_experts, mix_experts_reference, sort_pairs
from tests.examples import examples


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

    ours = mix_experts(x, logits, gate_up, down, top_k=top_k, renormalise=renormalise)

    wide = (tensor.double() for tensor in (x, logits, gate_up, down))
    expected = mix_experts_reference(*wide, top_k=top_k, renormalise=renormalise)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_token_is_computed_alike_in_every_batch() -> None:
    """Other tokens, which fill the tiles of the same experts, do not change a bit."""
    torch.manual_seed(0)
    x, logits = torch.randn(30, 32).half(), torch.randn(30, 4)
    gate_up, down = torch.randn(4, 32, 32).half(), torch.randn(4, 32, 16).half()
    together = mix_experts(x, logits, gate_up, down, top_k=2, renormalise=True)
    for keep in (slice(0, 20), slice(7, 29)):
        part = mix_experts(x[keep], logits[keep], gate_up, down, top_k=2, renormalise=True)

        assert torch.equal(part, together[keep])


def test_pairs_are_sorted_by_expert_and_then_by_token() -> None:
    """Each pair has one position; an expert's pairs are adjacent."""
    pairs = sort_pairs(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)

    assert pairs.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert pairs.starts.tolist() == [0, 2, 2, 4, 6, 6]
