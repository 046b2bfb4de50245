"""Device functions for one row's scores: load logits, compute sort keys, find each tile's largest logit."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import constant, jit, kernel, tl

SIGN = constant(0x80000000)
ALL_BITS = constant(0xFFFFFFFF)
"""A sort key with all bits set, which is larger than the key of every score."""
NO_TOKEN = constant(0x7FFFFFFF)
"""Larger than every token."""


@jit
def scores_tile(row_ptr: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return float32 scores divided by the temperature; -inf for NaN and outside the row; no negative zero."""
    return scores_of(logits_tile(row_ptr, token, vocab_size), temperature)


@jit
def logits_tile(row_ptr: tl.tensor, token: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Return float32 logits; -inf outside the row."""
    return tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


@jit
def scores_of(logit: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return logits divided by the temperature; -inf for NaN; no negative zero."""
    score = tl.div_rn(logit, tl.zeros_like(logit) + temperature) + 0.0
    return tl.where(score == score, score, -float("inf"))


@jit
def sort_key(score: tl.tensor) -> tl.tensor:
    """Map floats to unsigned integers that sort in the same order."""
    bits = score.to(tl.uint32, bitcast=True)
    # Not ~bits, which some interpreter versions do not support for unsigned numbers.
    return tl.where(bits >= SIGN, bits ^ ALL_BITS, bits | SIGN)


@jit
def score_of(value: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the score of a scalar logit, bit-equal to that of `scores_tile`."""
    return tl.div_rn(value, temperature) + 0.0


@jit
def best_score(
    maxima_ptr: tl.tensor, row: tl.tensor, num_tiles: tl.tensor, temperature: tl.tensor, MOST_TILES: tl.constexpr
) -> tl.tensor:
    """Return the largest score of a row."""
    tile = tl.arange(0, MOST_TILES)
    maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    return score_of(tl.max(maxima, 0), temperature)


@kernel
def maxima_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Find the largest logit and its first token in TILES tiles of one row per program; NaN counts as +inf."""
    row = tl.program_id(0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logit = logits_tile(row_ptr, token, vocab_size)
    logit = tl.where(logit == logit, logit, float("inf"))
    largest = tl.max(logit, 1)
    first = tl.min(tl.where(logit == largest[:, None], token, NO_TOKEN), 1)
    inside = tile < num_tiles
    tl.store(maxima_ptr + row * num_tiles + tile, largest, mask=inside)
    tl.store(tokens_ptr + row * num_tiles + tile, first, mask=inside)
