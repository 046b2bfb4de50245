"""One row's candidates: the tokens near the top-k and top-p threshold, found by number and mass above pivots.

Two arrays pass values between the kernels:

    sums   [num_rows, 2, 1 + 2 * num_chunks, PIVOTS] float32: for each row and round, the pivots; then, for each chunk
           of the vocabulary, the mass and the number of tokens at or above each pivot
    rows   [num_rows, FIELDS] int32: the number of candidates, the smallest key that is kept, the last token that is
           kept among those with this key, and for a small k the lower limit of the threshold
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import constant, jit, kernel_with, tl
from kernels.sampling_triton.scores import best_score, score_of, scores_tile

NUM_PIVOTS = 16
PIVOTS = constant(NUM_PIVOTS)
NUM_FIELDS = 4
FIELDS = constant(NUM_FIELDS)
NUM_CANDIDATES, THRESHOLD, LAST, LOWER_LIMIT = constant(0), constant(1), constant(2), constant(3)
SPAN = constant(32.0)
"""Scores more than this many nats below the best score do not matter."""
PER_ROW = ("temperature_ptr", "top_k_ptr", "top_p_ptr")
"""Pointers that change from step to step; see `kernel_with`."""


@jit
def truncates(temperature: tl.tensor, top_p: tl.tensor, truncates_k: tl.tensor) -> tl.tensor:
    """Return whether top-k or top-p removes tokens of a row."""
    return (temperature > 0) & ((top_p < 1.0) | truncates_k)


@jit
def is_small(top_k: tl.tensor, num_tiles: tl.tensor) -> tl.tensor:
    """Return whether k is so small that the tile maxima give a lower bound for the threshold."""
    return top_k * 4 <= num_tiles * 3


@jit
def _round_sums(sums_ptr: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, ROUND: tl.constexpr,
                MOST_CHUNKS: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Return one round's pivots, and the mass and number of tokens at or above each pivot."""
    pivot = tl.arange(0, PIVOTS)
    chunk = tl.arange(0, MOST_CHUNKS)[:, None]
    sums_ptr += (row.to(tl.int64) * 2 + ROUND) * (1 + 2 * num_chunks) * PIVOTS
    place = sums_ptr + PIVOTS + chunk * 2 * PIVOTS + pivot[None, :]
    mass = tl.sum(tl.load(place, mask=chunk < num_chunks, other=0.0), 0)
    number = tl.sum(tl.load(place + PIVOTS, mask=chunk < num_chunks, other=0.0), 0)
    return tl.load(sums_ptr + pivot), mass, number


@jit
def _at(values: tl.tensor, index: tl.tensor, otherwise: tl.tensor) -> tl.tensor:
    """Return ``values[index]`` from a tensor of 16 values, or ``otherwise`` if the index is -1."""
    pivot = tl.arange(0, PIVOTS)
    found = tl.max(tl.where(pivot == index, values, -float("inf")), 0)
    return tl.where(index < 0, otherwise, found)


@jit
def _first_interval(
    sums_ptr: tl.tensor,
    row: tl.tensor,
    num_chunks: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    truncates_k: tl.tensor,
    MOST_CHUNKS: tl.constexpr,
) -> tl.tuple:
    """Return the interval that contains the threshold after the first round.

    Returns:
        The interval's ends [low, high); the number and mass of the tokens at or above ``high``; the number of tokens in
        the interval; the whole row's mass; and whether k removes a token that matters.
    """
    pivot = tl.arange(0, PIVOTS)
    pivots, mass, number = _round_sums(sums_ptr, row, num_chunks, 0, MOST_CHUNKS)
    total = _at(mass, tl.cast(PIVOTS - 1, tl.int32), 0.0)
    by_number = truncates_k & (_at(number, tl.cast(PIVOTS - 2, tl.int32), 0.0) >= top_k.to(tl.float32))
    reached = mass >= top_p * total
    if by_number:
        reached = number >= top_k.to(tl.float32)
    index = tl.min(tl.where(reached, pivot, PIVOTS - 1), 0)
    # With both filters, all tokens above the lower bound are candidates, because top-p needs the mass of the k best
    # tokens.
    above = tl.where(by_number & (top_p < 1.0), -1, index - 1)
    low, high = _at(pivots, index, 0.0), _at(pivots, above, float("inf"))
    number_above, mass_above = _at(number, above, 0.0), _at(mass, above, 0.0)
    return low, high, number_above, mass_above, _at(number, index, 0.0) - number_above, total, by_number


@jit
def threshold_interval(
    sums_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row: tl.tensor,
    num_tiles: tl.tensor,
    num_chunks: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    truncates_k: tl.tensor,
    MOST_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> tl.tuple:
    """Return the interval after both rounds, in the format of `_first_interval` without the number of tokens."""
    low = tl.load(rows_ptr + row * FIELDS + LOWER_LIMIT).to(tl.float32, bitcast=True)
    high = tl.cast(float("inf"), tl.float32)
    number_above, mass_above, total = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
    by_number = truncates_k
    if not (truncates_k & is_small(top_k, num_tiles)):
        low, high, number_above, mass_above, inside, total, by_number = _first_interval(
            sums_ptr, row, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS
        )
        if (inside > CAPACITY) & (low > -float("inf")) & ((not by_number) | (top_p >= 1.0)):
            pivot = tl.arange(0, PIVOTS)
            pivots, mass, number = _round_sums(sums_ptr, row, num_chunks, 1, MOST_CHUNKS)
            reached = mass >= top_p * total
            if by_number:
                reached = number >= top_k.to(tl.float32)
            index = tl.min(tl.where(reached, pivot, PIVOTS - 1), 0)
            low = _at(pivots, index, 0.0)
            if index > 0:
                high = _at(pivots, index - 1, 0.0)
                number_above, mass_above = _at(number, index - 1, 0.0), _at(mass, index - 1, 0.0)
    return low, high, number_above, mass_above, total, by_number


@kernel_with(varying=PER_ROW)
def pivots_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    num_chunks: tl.tensor,
    ROUND: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Sum the number and mass of tokens at or above each of 16 pivots, in one chunk of one row per program.

    The pivots of round 0 divide the range of scores that can matter. Those of round 1 divide one interval of this range
    if it has too many tokens. The last pivot is the lower end of the range, which is -inf in round 0.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    if (ROUND == 0) & (chunk == 0):
        tl.store(rows_ptr + row * FIELDS + NUM_CANDIDATES, 0)
    if not truncates(temperature, top_p, truncates_k):
        return
    best = best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
    if truncates_k & (is_small(top_k, num_tiles)):
        if (ROUND == 0) & (chunk == 0):
            # The k-th largest of the tile maxima is a lower bound: at least k tokens reach it.
            tile = tl.arange(0, MOST_TILES)
            maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
            larger = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), 1)
            limit = tl.min(tl.where(larger < top_k, maxima, float("inf")), 0)
            low = tl.maximum(score_of(limit, temperature), best - SPAN)
            tl.store(rows_ptr + row * FIELDS + LOWER_LIMIT, low.to(tl.int32, bitcast=True))
        return
    pivot = tl.arange(0, PIVOTS)
    if ROUND == 0:
        # top-p removes every token with a probability below (1 - p) / vocab_size of the best token's.
        tail = tl.log(tl.cast(vocab_size, tl.float32) / tl.maximum(1.0 - top_p, 1e-8))
        span = tl.where(truncates_k, SPAN, tl.minimum(tail, SPAN))
        pivots = tl.where(pivot == PIVOTS - 1, -float("inf"), best - (pivot + 1).to(tl.float32) * (span / (PIVOTS - 1)))
    else:
        low, high, _, _, inside, _, by_number = _first_interval(
            sums_ptr, row, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS
        )
        if (inside <= CAPACITY) | (low == -float("inf")) | (by_number & (top_p < 1.0)):
            return
        high = tl.minimum(high, best)
        pivots = tl.maximum(high - (pivot + 1).to(tl.float32) * ((high - low) / PIVOTS), low)
        pivots = tl.where(pivot == PIVOTS - 1, low, pivots)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    score = scores_tile(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size, temperature)
    weight = tl.exp(score - best)
    reached = score[None, :] >= pivots[:, None]
    mass = tl.sum(tl.where(reached, weight[None, :], 0.0), 1)
    number = tl.sum(tl.where(reached, 1.0, 0.0), 1)
    sums_ptr += (row.to(tl.int64) * 2 + ROUND) * (1 + 2 * num_chunks) * PIVOTS
    if chunk == 0:
        tl.store(sums_ptr + pivot, pivots)
    tl.store(sums_ptr + PIVOTS + chunk * 2 * PIVOTS + pivot, mass)
    tl.store(sums_ptr + 2 * PIVOTS + chunk * 2 * PIVOTS + pivot, number)


@kernel_with(varying=PER_ROW)
def gather_kernel(
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
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
) -> None:
    """Append the tokens in the interval to the row's candidates, from TILES tiles per program; count all of them."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    if not truncates(temperature, top_p, truncates_k):
        return
    low, high, _, _, _, _ = threshold_interval(
        sums_ptr, rows_ptr, row, num_tiles, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS, CAPACITY
    )
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    for tile in range(chunk * TILES, tl.minimum((chunk + 1) * TILES, num_tiles)):
        largest = score_of(tl.load(maxima_ptr + row * num_tiles + tile), temperature)
        if (largest >= low) & (low > -float("inf")):
            token = tile * TILE + tl.arange(0, TILE)
            score = scores_tile(row_ptr, token, vocab_size, temperature)
            inside = (score >= low) & (score < high)
            number = tl.sum(inside.to(tl.int32), 0)
            if number > 0:
                first = tl.atomic_add(rows_ptr + row * FIELDS + NUM_CANDIDATES, number)
                place = first + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(candidates_ptr + row * CAPACITY + place, token, mask=inside & (place < CAPACITY))
