"""One row's threshold: the smallest score that top-k and top-p keep, found exactly among the candidates."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import constant, jit, kernel_with, tl
from kernels.sampling_triton.candidates import (
    FIELDS,
    LAST,
    NUM_CANDIDATES,
    PER_ROW,
    THRESHOLD,
    threshold_interval,
    truncates,
)
from kernels.sampling_triton.scores import ALL_BITS, best_score, scores_tile, sort_key

ONE = constant(2.0**44)
"""The fixed-point mass of the best token."""
UNIT = constant(2.0**-44)
"""The unit of fixed-point masses."""
SMALLEST_TARGET = constant(1e-7)
"""Minimum mass that top-p keeps, relative to the best token, which alone exceeds it."""


@jit
def _fixed(score: tl.tensor, best: tl.tensor) -> tl.tensor:
    """Return ``exp(score - best)`` as an integer in units of 2^-44; a sum over the vocabulary fits into 63 bits."""
    return (tl.exp(score - best) * ONE).to(tl.int64)


@jit
def _largest_reaching(
    key: tl.tensor, weight: tl.tensor, least: tl.tensor, largest: tl.tensor, above: tl.tensor, target: tl.tensor
) -> tl.tensor:
    """Return the largest x for which ``above`` plus the total weight of keys >= x reaches ``target``.

    All keys with a weight are within [least, largest]. If no x reaches the target, the result is <= least.
    """
    differing = least ^ largest
    found = tl.cast(0, tl.uint32)
    for step in range(32):
        bit = tl.cast(1, tl.uint32) << tl.cast(31 - step, tl.uint32)
        if differing >= bit:
            trial = found | bit
            if above + tl.sum(tl.where(key >= trial, weight, 0), 0) >= target:
                found = trial
        else:
            # All keys agree in this bit and all higher bits.
            found = found | (largest & bit)
    return found


@jit
def _number_staying(above: tl.tensor, weight: tl.tensor, target: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return how many of ``number`` tokens with equal weight must stay so that ``above`` plus theirs reaches target."""
    weight = tl.maximum(weight, 1)
    return tl.minimum(tl.maximum((target - above + weight - 1) // weight, 1), number)


@jit
def _select_candidates(
    row_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    num_candidates: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    by_number: tl.tensor,
    number_above: tl.tensor,
    mass_above: tl.tensor,
    total: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tuple:
    """Return the threshold's key and the last token with this key that stays, from at most SIZE candidates."""
    place = tl.arange(0, SIZE)
    listed = place < num_candidates
    token = tl.load(candidates_ptr + place, mask=listed, other=0)
    score = scores_tile(row_ptr, token, vocab_size, temperature)
    key = sort_key(score)
    smallest = tl.min(tl.where(listed, key, ALL_BITS).to(tl.uint32), 0)
    largest = tl.max(tl.where(listed, key, 0).to(tl.uint32), 0)
    threshold = tl.cast(0, tl.uint32)
    last = tl.cast(vocab_size, tl.int32)
    if by_number:
        ones = listed.to(tl.int64)
        threshold = _largest_reaching(key, ones, smallest, largest, number_above.to(tl.int64), top_k.to(tl.int64))
    if top_p < 1.0:
        listed = listed & (key >= threshold)
        weight = tl.where(listed, _fixed(score, best), 0)
        # In units of 2^-44, see `_fixed`.
        above = (mass_above * ONE).to(tl.int64)
        if by_number:
            total = (above + tl.sum(weight, 0)).to(tl.float32) * UNIT
        # Keep the best token even if p = 0.
        target = (tl.maximum(top_p * total, SMALLEST_TARGET) * ONE).to(tl.int64)
        smallest = tl.min(tl.where(listed, key, ALL_BITS).to(tl.uint32), 0)
        # A rounded sum may miss the target. In that case, keep all candidates.
        threshold = tl.maximum(_largest_reaching(key, weight, smallest, largest, above, target), smallest)
        tied = listed & (key == threshold)
        above += tl.sum(tl.where(key > threshold, weight, 0), 0)
        number = tl.sum(tied.to(tl.int64), 0)
        staying = _number_staying(above, tl.max(tl.where(tied, weight, 0), 0), target, number)
        if staying < number:
            # The largest index with fewer than ``staying`` tied tokens before it.
            last = tl.cast(0, tl.int32)
            for step in range(24):
                trial = last + (tl.cast(1, tl.int32) << (23 - step))
                if tl.sum((tied & (token < trial)).to(tl.int64), 0) < staying:
                    last = trial
    return threshold, last


@jit
def _row_sum(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    least: tl.tensor,
    BY_NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return the number or the fixed-point mass of a row's tokens whose keys are at least ``least``."""
    found = tl.cast(0, tl.int64)
    for first in range(0, vocab_size, SIZE):
        token = first + tl.arange(0, SIZE)
        score = scores_tile(row_ptr, token, vocab_size, temperature)
        inside = (sort_key(score) >= least) & (token < vocab_size)
        if BY_NUMBER:
            found += tl.sum(inside.to(tl.int64), 0)
        else:
            found += tl.sum(tl.where(inside, _fixed(score, best), 0), 0)
    return found


@jit
def _select_row(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    by_number: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tuple:
    """Compute the results of `_select_candidates` for a row with too many candidates, by reading the whole row."""
    threshold = tl.cast(0, tl.uint32)
    last = tl.cast(vocab_size, tl.int32)
    if by_number:
        for step in range(32):
            trial = threshold | (tl.cast(1, tl.uint32) << tl.cast(31 - step, tl.uint32))
            if _row_sum(row_ptr, vocab_size, temperature, best, trial, True, SIZE) >= top_k:
                threshold = trial
    if top_p < 1.0:
        least = threshold
        total = _row_sum(row_ptr, vocab_size, temperature, best, least, False, SIZE)
        # Keep the best token even if p = 0, and let no sum be rounded above the total.
        target = tl.maximum(top_p * (total.to(tl.float32) * UNIT), SMALLEST_TARGET) * ONE
        target = tl.minimum(target.to(tl.int64), total)
        threshold = tl.cast(0, tl.uint32)
        for step in range(32):
            trial = threshold | (tl.cast(1, tl.uint32) << tl.cast(31 - step, tl.uint32))
            if _row_sum(row_ptr, vocab_size, temperature, best, trial, False, SIZE) >= target:
                threshold = trial
        threshold = tl.maximum(threshold, least)
        above = _row_sum(row_ptr, vocab_size, temperature, best, threshold + 1, False, SIZE)
        ties = tl.cast(0, tl.int32)
        last = tl.cast(-1, tl.int32)
        for first in range(0, vocab_size, SIZE):
            token = first + tl.arange(0, SIZE)
            score = scores_tile(row_ptr, token, vocab_size, temperature)
            tied = (sort_key(score) == threshold) & (token < vocab_size)
            before = ties + tl.cumsum(tied.to(tl.int32), 0) - 1
            stays = tied & (above + before.to(tl.int64) * tl.maximum(_fixed(score, best), 1) < target)
            last = tl.maximum(last, tl.max(tl.where(stays, token, -1), 0))
            ties += tl.sum(tied.to(tl.int32), 0)
    return threshold, last


@kernel_with(varying=PER_ROW)
def select_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    num_chunks: tl.tensor,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Find the tokens that top-k and top-p keep; each program handles one row.

    The results are the smallest kept sort key, and the last kept token with exactly this key. A row without truncation
    keeps every key.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    tl.store(rows_ptr + row * FIELDS + THRESHOLD, 0)
    tl.store(rows_ptr + row * FIELDS + LAST, vocab_size)
    if not truncates(temperature, top_p, truncates_k):
        return
    num_candidates = tl.load(rows_ptr + row * FIELDS + NUM_CANDIDATES)
    if num_candidates == 0:
        return
    _low, _high, number_above, mass_above, total, by_number = threshold_interval(
        sums_ptr, rows_ptr, row, num_tiles, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS, CAPACITY
    )
    best = best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    listed_ptr = candidates_ptr + row * CAPACITY
    if num_candidates <= TILE:
        threshold, last = _select_candidates(
            row_ptr, listed_ptr, num_candidates, vocab_size, temperature, best, top_k, top_p, by_number,
            number_above, mass_above, total, TILE,
        )  # fmt: skip
    elif num_candidates <= CAPACITY:
        threshold, last = _select_candidates(
            row_ptr, listed_ptr, num_candidates, vocab_size, temperature, best, top_k, top_p, by_number,
            number_above, mass_above, total, CAPACITY,
        )  # fmt: skip
    else:
        threshold, last = _select_row(row_ptr, vocab_size, temperature, best, top_k, top_p, by_number, CAPACITY)
    tl.store(rows_ptr + row * FIELDS + THRESHOLD, threshold.to(tl.int32, bitcast=True))
    tl.store(rows_ptr + row * FIELDS + LAST, last)
