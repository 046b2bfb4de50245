"""Triton kernels of `kernels.philox`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, tl


@jit
def philox_words_tile(
    seed: tl.tensor, position: tl.tensor, choice: tl.tensor, first_group: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """Device function: return the uint32 words of TILE consecutive vocabulary indices from ``4 * first_group`` on.

    seed: int64 scalar; position, choice: int32 scalars; one counter serves four indices.
    """
    group = first_group + tl.arange(0, TILE // 4)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero + choice, zero)
    # join() adds an innermost dimension: [[w0, w1], [w2, w3]] per counter, read out in index order.
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))


@jit
def uniform_tile(words: tl.tensor) -> tl.tensor:
    """Device function of `uniform_from_words`."""
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


@jit
def gumbel_tile(words: tl.tensor) -> tl.tensor:
    """Device function of `gumbel_from_words`, with an error of a few 1e-6."""
    return -tl.log(-tl.log(uniform_tile(words)))
