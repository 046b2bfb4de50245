"""Samples one token per row: the one with the largest score plus noise among those that the filters keep."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, kernel_with, tl
from kernels.gpu.philox import gumbel_tile, philox_words_tile
from kernels.sampling_triton.candidates import FIELDS, LAST, THRESHOLD
from kernels.sampling_triton.scores import NO_TOKEN, best_score, logits_tile, score_of, scores_of, sort_key


@kernel_with(varying=("temperature_ptr", "min_p_ptr", "seed_ptr", "choice_ptr", "position_ptr", "first_group"))
def draw_tiles_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    choice_ptr: tl.tensor,
    position_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    first_group: tl.tensor,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
) -> None:
    """Find the largest score plus noise in one tile of one row per program, ties to the lowest index.

    The noise is that of the vocabulary indices from 4 * first_group on.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    place = row * num_tiles + tile
    temperature = tl.load(temperature_ptr + row)
    random = temperature > 0
    divisor = 1.0
    if not SCALED:
        divisor = tl.where(random, temperature, 1.0)
    threshold = tl.cast(0, tl.uint32)
    if rows_ptr is not None:
        largest = tl.load(maxima_ptr + place)
        if not random:
            tl.store(sums_ptr + place, largest)
            return
        threshold = tl.load(rows_ptr + row * FIELDS + THRESHOLD).to(tl.uint32, bitcast=True)
        largest = score_of(largest, temperature)
        best = best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
        min_p = tl.load(min_p_ptr + row)
        if (sort_key(largest) < threshold) | (tl.exp(largest - best) < min_p):
            tl.store(sums_ptr + place, -float("inf"))
            return
    token = tile * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logit = logits_tile(row_ptr, token, vocab_size)
    score = scores_of(logit, divisor)
    if rows_ptr is not None:
        key = sort_key(score)
        kept = (key > threshold) | ((key == threshold) & (token <= tl.load(rows_ptr + row * FIELDS + LAST)))
        # Use "removed if <", so that scores of +inf stay: their difference is NaN, and comparisons with NaN are false.
        unlikely = tl.exp(score - best) < min_p
        score = tl.where(kept & (unlikely == 0), score, -float("inf"))
    else:
        tl.store(maxima_ptr + place, tl.max(tl.where(logit == logit, logit, float("inf")), 0))
    if random:
        words = philox_words_tile(
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            tl.load(choice_ptr + row),
            first_group + tile * (TILE // 4),
            TILE,
        )
        score += gumbel_tile(words)
    sum_ = tl.max(score, 0)
    tl.store(sums_ptr + place, sum_)
    tl.store(tokens_ptr + place, tl.min(tl.where(score == sum_, token, NO_TOKEN), 0))


@kernel
def draw_rows_kernel(
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    found_ptr: tl.tensor,
    num_tiles: tl.tensor,
    MOST_TILES: tl.constexpr,
) -> None:
    """Find one row's best tile per program, ties to the first tile; -1 if the row cannot be sampled."""
    row = tl.program_id(0)
    tile = tl.arange(0, MOST_TILES)
    place = row * num_tiles + tile
    inside = tile < num_tiles
    largest = tl.max(tl.load(maxima_ptr + place, mask=inside, other=-float("inf")), 0)
    sums = tl.load(sums_ptr + place, mask=inside, other=-float("inf"))
    best = tl.min(tl.where((sums == tl.max(sums, 0)) & inside, tile, num_tiles - 1), 0)
    token = tl.load(tokens_ptr + row * num_tiles + best).to(tl.int64)
    finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(found_ptr + row, tl.where(finite, token, -1))
