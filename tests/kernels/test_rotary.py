"""Rotary embedding against `transformers` and against the rotation it stands for."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.rotary import apply_rotary


def angles(num_tokens: int, half: int) -> torch.Tensor:
    """Return random angles."""
    positions = torch.arange(3, 3 + num_tokens, dtype=torch.float32)
    return positions[:, None] * 10000.0 ** -(torch.arange(half) / half)


def test_equals_transformers_in_float32() -> None:
    """Query and key come out as `apply_rotary_pos_emb` rotates them."""
    query, key, angle = torch.randn(5, 4, 64), torch.randn(5, 2, 64), angles(5, 32)
    full = torch.cat([angle, angle], dim=-1)
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], full.cos()[None], full.sin()[None]
    )
    rotated = apply_rotary(query, key, angle.cos(), angle.sin())

    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


def test_partial_rotary_leaves_the_rest_alone() -> None:
    """With rotary_dim below head_dim, the first part is rotated like complex numbers, and the rest does not change."""
    query, key, angle = torch.randn(5, 4, 80), torch.randn(5, 1, 80), angles(5, 16)
    rotated, _ = apply_rotary(query, key, angle.cos(), angle.sin())
    turned = torch.complex(query[..., :16], query[..., 16:32]) * torch.polar(torch.ones(()), angle)[:, None]

    torch.testing.assert_close(rotated[..., :32], torch.cat([turned.real, turned.imag], dim=-1))
    assert torch.equal(rotated[..., 32:], query[..., 32:])


def test_bfloat16_is_rounded_once() -> None:
    """In 16 bits the result is the float32 rotation rounded to nearest."""
    query, key, angle = torch.randn(5, 4, 64).bfloat16(), torch.randn(5, 2, 64).bfloat16(), angles(5, 32)
    rotated, _ = apply_rotary(query, key, angle.cos(), angle.sin())
    exact, _ = apply_rotary(query.float(), key.float(), angle.cos(), angle.sin())

    assert torch.equal(rotated, exact.bfloat16())
