"""Launches of the sampling kernels; the package documents their order."""

from __future__ import annotations

import torch

from kernels._dispatch import next_power_of_2
from kernels.sampling_reference import SamplingTensors
from kernels.sampling_triton.candidates import NUM_FIELDS, NUM_PIVOTS, gather_kernel, pivots_kernel
from kernels.sampling_triton.draw import draw_rows_kernel, draw_tiles_kernel
from kernels.sampling_triton.scores import maxima_kernel
from kernels.sampling_triton.threshold import select_kernel

TILE = 1024
"""Tokens per tile."""
TILES_PER_PROGRAM = 4
CANDIDATES = 8192
"""Maximum number of candidates stored per row. If more scores are nearly equal, `select_kernel` reads the whole row."""


def sample_triton(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Compute `sample_checked` for CUDA tensors without reading a value back; ignores ``typical_p``."""
    if not params.any_random:
        return greedy_triton(logits)
    if not params.any_truncation:
        return draw_triton(logits, params)
    maxima, tokens, rows = select_triton(logits, params)
    return _draw(logits, params, maxima, tokens, rows, scaled=False)[1]


def select_triton(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the tokens that top-k and top-p keep.

    Returns:
        Each tile's largest logit and its token, ``[num_rows, num_tiles]`` float32 and int32; and ``[num_rows, 4]``
        int32: the number of candidates, the smallest kept key (as unsigned), the last kept token with this key, and a
        value that only the kernels use. Tokens that can never be sampled may or may not be kept.
    """
    num_rows, vocab_size = logits.shape
    maxima, tokens = _per_tile(logits)
    num_tiles = maxima.shape[1]
    num_chunks = -(-num_tiles // TILES_PER_PROGRAM)
    # For each row and round, the pivots. For each chunk, the mass and the number of tokens at or above each pivot.
    sums = torch.empty(num_rows, 2, 1 + 2 * num_chunks, NUM_PIVOTS, dtype=torch.float32, device=logits.device)
    rows = torch.empty(num_rows, NUM_FIELDS, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    _find_maxima(logits, maxima, tokens)
    columns = (logits, params.temperature, params.top_k, params.top_p, maxima, sums, rows)
    sizes = (logits.stride(0), vocab_size, num_tiles, num_chunks)
    most = {
        "TILE": TILE,
        "MOST_TILES": next_power_of_2(num_tiles),
        "MOST_CHUNKS": next_power_of_2(num_chunks),
        "CAPACITY": CANDIDATES,
    }
    grid = (num_rows, num_chunks)
    for round_ in (0, 1):
        pivots_kernel[grid](*columns, *sizes, ROUND=round_, CHUNK=TILE * TILES_PER_PROGRAM, **most)
    gather_kernel[grid](*columns, candidates, *sizes, TILES=TILES_PER_PROGRAM, **most)
    select_kernel[(num_rows,)](*columns, candidates, *sizes, **most, num_warps=8)
    return maxima, tokens, rows


def greedy_triton(logits: torch.Tensor) -> torch.Tensor:
    """Compute `greedy` for CUDA tensors: each row's token with the largest logit, -1 if the row cannot be sampled."""
    maxima, tokens = _per_tile(logits)
    _find_maxima(logits, maxima, tokens)
    return _best_tile(maxima, maxima, tokens)


def draw_triton(logits: torch.Tensor, params: SamplingTensors, *, scaled: bool = False) -> torch.Tensor:
    """Draw without filters; if ``scaled``, from processed float32 scores, without temperature."""
    maxima, tokens = _per_tile(logits)
    return _draw(logits, params, maxima, tokens, None, scaled=scaled)[1]


def draw_best_triton(logits: torch.Tensor, params: SamplingTensors, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample without filters from a part of the vocabulary that begins at index ``first``, a multiple of 4.

    Returns:
        For each row, the largest score plus noise, ``[num_rows]`` float32, and its token, ``[num_rows]`` int64,
        relative to ``first``; -1 for a row that cannot be sampled.
    """
    maxima, tokens = _per_tile(logits)
    sums, found = _draw(logits, params, maxima, tokens, None, scaled=False, first=first)
    return sums.amax(dim=1), found


def _per_tile(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate one float32 and one int32 tensor with one element per tile of each row."""
    shape = (logits.shape[0], -(-logits.shape[1] // TILE))
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


def _find_maxima(logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor) -> None:
    num_rows, num_tiles = maxima.shape
    maxima_kernel[(num_rows, -(-num_tiles // TILES_PER_PROGRAM))](
        logits, maxima, tokens, logits.stride(0), logits.shape[1], num_tiles, TILE=TILE, TILES=TILES_PER_PROGRAM
    )


def _draw(
    logits: torch.Tensor,
    params: SamplingTensors,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor | None,
    *,
    scaled: bool,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row; return each tile's largest score plus noise, and the tokens.

    If ``rows`` (the results of the filters) is given, `maxima_kernel` has already written ``maxima`` and ``tokens``.
    Otherwise this function writes them.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = maxima.shape[1]
    sums = torch.empty_like(maxima)
    draw_tiles_kernel[(num_rows, num_tiles)](
        logits,
        params.temperature,
        params.min_p,
        params.seed,
        params.choice,
        params.position,
        rows,
        maxima,
        sums,
        tokens,
        logits.stride(0),
        vocab_size,
        num_tiles,
        first // 4,
        SCALED=scaled,
        TILE=TILE,
        MOST_TILES=next_power_of_2(num_tiles),
    )
    return sums, _best_tile(maxima, sums, tokens)


def _best_tile(maxima: torch.Tensor, sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    num_rows, num_tiles = maxima.shape
    found = torch.empty(num_rows, dtype=torch.int64, device=maxima.device)
    draw_rows_kernel[(num_rows,)](maxima, sums, tokens, found, num_tiles, MOST_TILES=next_power_of_2(num_tiles))
    return found
