"""Triton kernels of `kernels.philox`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, tl


@jit
def philox_words_tile(
    seed: tl.tensor, position: tl.tensor, choice: tl.tensor, first_group: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Device function: return the uint32 words of TILE consecutive vocabulary indices from ``4 * first_group`` on.

    seed: int64 scalar; position, choice: int32 scalars. One Philox counter produces the words of four indices.
    """
    group = first_group + tl.arange(0, TILE // 4)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero + choice, zero)
    # join() adds an innermost dimension: [[w0, w1], [w2, w3]] per counter, which is read in index order.
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))


@jit
def uniform_tile(words: tl.tensor) -> tl.tensor:
    """Device function of `uniform_from_words`."""
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return tl.minimum(uniform, 0.999999940395355224609375)  # 1 - 2 ** -24


@jit
def gumbel_tile(words: tl.tensor) -> tl.tensor:
    """Device function for `gumbel_from_words`, with an error of a few 1e-6.

    float32 has too few digits to compute the logarithm of a number near 1 directly, so a series is used.
    """
    uniform = uniform_tile(words)
    ratio = uniform / (2.0 - uniform)
    square = ratio * ratio
    series = 2.0 * ratio * (1.0 + square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0))))
    return -tl.log(tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform)))
