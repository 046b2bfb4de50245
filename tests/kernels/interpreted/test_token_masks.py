"""The kernel that applies masks of allowed tokens, against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.token_masks import mask_tokens, mask_tokens_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_forbidden_tokens_of_masked_rows_change(vocab_size: int, dtype: torch.dtype) -> None:
    """Each row gets its own mask; every token without a bit becomes -inf, and all other logits are unchanged."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    allowed = torch.rand(4, -(-vocab_size // 32) * 32, generator=generator) < 0.5
    bits = (allowed.view(4, -1, 32).long() << torch.arange(32)).sum(2)
    masks = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int()
    places, lines = torch.tensor([4, 0, 3]), torch.tensor([1, 3, 0])
    expected = logits.clone()
    for place, line in zip(places.tolist(), lines.tolist(), strict=True):
        expected[place, ~allowed[line, :vocab_size]] = -torch.inf

    for apply in (mask_tokens, mask_tokens_reference):
        found = logits.clone()
        apply(found, places, masks, lines)
        assert torch.equal(found, expected)
