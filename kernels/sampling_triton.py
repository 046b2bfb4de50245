"""Sampling on a GPU without a sort and without reading a value back; `kernels.sampling` documents the rules.

Top-k and top-p keep the tokens at or above a *threshold*: the k-th largest score, or the score down to which the
cumulative probability reaches p. The vocabulary is read by many programs per row; only a short list of *candidates*,
the tokens near the threshold, is searched by one program per row. Six kernels do this; each is a launch, because each
needs the results of all programs before it:

1. `_maxima_kernel`: the largest logit of each *tile* of 1,024 tokens, and its token.
2. `_pivots_kernel`, twice: number and mass of the tokens at or above each of 16 *pivots* between the best score and
   the lowest one that can matter. They tell in which interval the threshold lies. A second round divides an interval
   with too many tokens. A row with a small k skips both: the k-th largest of the tiles' maxima is a lower limit, and
   few tokens exceed it.
3. `_gather_kernel`: collects the candidates, the tokens in the interval.
4. `_select_kernel`: finds the exact threshold among the candidates, bit by bit from the top.
5. `_draw_tiles_kernel`: applies temperature, threshold, min-p and noise. Tiles whose maximum is below the threshold are
   not read.
6. `_draw_rows_kernel`: the best tile of each row.

Greedy rows need only the first and the last one, rows without truncation only the last two.

Tokens more than 32 nats below the best one are left out of the search: together they weigh less than the rounding of a
float32 sum, and the noise is too small for one of them to win.

The candidates of a row are stored in no fixed order. Their masses are therefore summed as integers, and equal scores
are ordered by their token. So the same logits give the same token in every batch. Scores are compared as *keys*:
unsigned integers in the order of the floats. If top-p cuts between equal scores, lower indices stay.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import jit, kernel, kernel_with, next_power_of_2, tl
from kernels.philox import gumbel_tile, philox_words_tile
from kernels.sampling_reference import SamplingTensors

TILE = 1024
"""Tokens of a tile."""
TILES_PER_PROGRAM = 4
CANDIDATES = 8192
"""Largest number of candidates that a row stores; with more equal or nearly equal scores, its program reads the row."""
_PIVOTS = 16


def sample_triton(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Compute `sample_checked` of CUDA tensors without reading a value back; ignores ``typical_p``."""
    if not params.any_random:
        return greedy_triton(logits)
    if not params.any_truncation:
        return draw_triton(logits, params)
    maxima, tokens, rows = select_triton(logits, params)
    return _draw(logits, params, maxima, tokens, rows, scaled=False)


def select_triton(logits: torch.Tensor, params: SamplingTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the tokens that top-k and top-p keep.

    Returns:
        The largest logit of each tile and its token, ``[num_rows, num_tiles]`` float32 and int32; and ``[num_rows, 4]``
        int32: the number of candidates, the smallest key that is kept (as unsigned), the last token that is kept among
        those with this key, and a value of the kernels. Tokens that are never drawn may be kept or not.
    """
    num_rows, vocab_size = logits.shape
    maxima, tokens = _per_tile(logits)
    num_tiles = maxima.shape[1]
    num_chunks = -(-num_tiles // TILES_PER_PROGRAM)
    # Of each row and round: the pivots, and per chunk the mass and the number of tokens at or above each of them.
    sums = torch.empty(num_rows, 2, 1 + 2 * num_chunks, _PIVOTS, dtype=torch.float32, device=logits.device)
    rows = torch.empty(num_rows, 4, dtype=torch.int32, device=logits.device)
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
        _pivots_kernel[grid](*columns, *sizes, ROUND=round_, CHUNK=TILE * TILES_PER_PROGRAM, **most)
    _gather_kernel[grid](*columns, candidates, *sizes, TILES=TILES_PER_PROGRAM, **most)
    _select_kernel[(num_rows,)](*columns, candidates, *sizes, **most, num_warps=8)
    return maxima, tokens, rows


def greedy_triton(logits: torch.Tensor) -> torch.Tensor:
    """Compute `greedy` of CUDA tensors: the token of the largest logit, -1 for a row that cannot be sampled."""
    maxima, tokens = _per_tile(logits)
    _find_maxima(logits, maxima, tokens)
    return _best_tile(maxima, maxima, tokens)


def draw_triton(logits: torch.Tensor, params: SamplingTensors, *, scaled: bool = False) -> torch.Tensor:
    """Draw without filters; if ``scaled``, from processed float32 scores, without temperature."""
    maxima, tokens = _per_tile(logits)
    return _draw(logits, params, maxima, tokens, None, scaled=scaled)


def _per_tile(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a float32 and an int32 for each tile of each row."""
    shape = (logits.shape[0], -(-logits.shape[1] // TILE))
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


def _find_maxima(logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor) -> None:
    num_rows, num_tiles = maxima.shape
    _maxima_kernel[(num_rows, -(-num_tiles // TILES_PER_PROGRAM))](
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
) -> torch.Tensor:
    """Draw a token per row.

    With ``rows``, the filters' results, ``maxima`` and ``tokens`` are those of `_maxima_kernel`. Without, this writes
    them.
    """
    num_rows, vocab_size = logits.shape
    num_tiles = maxima.shape[1]
    sums = torch.empty_like(maxima)
    _draw_tiles_kernel[(num_rows, num_tiles)](
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
        SCALED=scaled,
        TILE=TILE,
        MOST_TILES=next_power_of_2(num_tiles),
    )
    return _best_tile(maxima, sums, tokens)


def _best_tile(maxima: torch.Tensor, sums: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    num_rows, num_tiles = maxima.shape
    found = torch.empty(num_rows, dtype=torch.int64, device=maxima.device)
    _draw_rows_kernel[(num_rows,)](maxima, sums, tokens, found, num_tiles, MOST_TILES=next_power_of_2(num_tiles))
    return found


@jit
def _scores_tile(row_ptr: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return float32 scores divided by the temperature; -inf for NaN and outside the row; no negative zero."""
    return _scores(_logits_tile(row_ptr, token, vocab_size), temperature)


@jit
def _logits_tile(row_ptr: tl.tensor, token: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Return float32 logits; -inf outside the row."""
    return tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


@jit
def _scores(logit: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return logits divided by the temperature; -inf for NaN; no negative zero."""
    score = tl.div_rn(logit, tl.zeros_like(logit) + temperature) + 0.0
    return tl.where(score == score, score, -float("inf"))


@jit
def _key(score: tl.tensor) -> tl.tensor:
    """Return unsigned integers in the order of the floats."""
    bits = score.to(tl.uint32, bitcast=True)
    # Not ~bits: some versions of the interpreter do not support it for unsigned numbers.
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _divided(value: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the score of a scalar logit, the same bits as `_scores_tile`."""
    return tl.div_rn(value, temperature) + 0.0


@jit
def _best_score(
    maxima_ptr: tl.tensor, row: tl.tensor, num_tiles: tl.tensor, temperature: tl.tensor, MOST_TILES: tl.constexpr
) -> tl.tensor:
    """Return the largest score of a row."""
    tile = tl.arange(0, MOST_TILES)
    maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    return _divided(tl.max(maxima, 0), temperature)


@kernel
def _maxima_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Find the largest logit and its first token in TILES tiles of one row per program; a NaN counts as +inf."""
    row = tl.program_id(0)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logit = _logits_tile(row_ptr, token, vocab_size)
    logit = tl.where(logit == logit, logit, float("inf"))
    largest = tl.max(logit, 1)
    first = tl.min(tl.where(logit == largest[:, None], token, 0x7FFFFFFF), 1)
    inside = tile < num_tiles
    tl.store(maxima_ptr + row * num_tiles + tile, largest, mask=inside)
    tl.store(tokens_ptr + row * num_tiles + tile, first, mask=inside)


@jit
def _round_sums(sums_ptr: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, ROUND: tl.constexpr,
                MOST_CHUNKS: tl.constexpr) -> tl.tuple:  # fmt: skip
    """Return the pivots of one round, and mass and number of the tokens at or above each."""
    pivot = tl.arange(0, 16)
    chunk = tl.arange(0, MOST_CHUNKS)[:, None]
    sums_ptr += (row.to(tl.int64) * 2 + ROUND) * (1 + 2 * num_chunks) * 16
    place = sums_ptr + 16 + chunk * 32 + pivot[None, :]
    mass = tl.sum(tl.load(place, mask=chunk < num_chunks, other=0.0), 0)
    number = tl.sum(tl.load(place + 16, mask=chunk < num_chunks, other=0.0), 0)
    return tl.load(sums_ptr + pivot), mass, number


@jit
def _at(values: tl.tensor, index: tl.tensor, otherwise: tl.tensor) -> tl.tensor:
    """Return ``values[index]`` of 16 values; ``otherwise`` if the index is -1."""
    pivot = tl.arange(0, 16)
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
    """Return the interval of the threshold after the first round.

    Returns:
        Its ends [low, high); number and mass of the tokens at or above ``high``; the number inside; the mass of the
        whole row; and whether k removes a token that matters.
    """
    pivot = tl.arange(0, 16)
    pivots, mass, number = _round_sums(sums_ptr, row, num_chunks, 0, MOST_CHUNKS)
    total = _at(mass, tl.cast(15, tl.int32), 0.0)
    by_number = truncates_k & (_at(number, tl.cast(14, tl.int32), 0.0) >= top_k.to(tl.float32))
    reached = mass >= top_p * total
    if by_number:
        reached = number >= top_k.to(tl.float32)
    index = tl.min(tl.where(reached, pivot, 15), 0)
    # With both filters everything above the lower end is a candidate: the mass of the k best tokens must be known.
    above = tl.where(by_number & (top_p < 1.0), -1, index - 1)
    low, high = _at(pivots, index, 0.0), _at(pivots, above, float("inf"))
    number_above, mass_above = _at(number, above, 0.0), _at(mass, above, 0.0)
    return low, high, number_above, mass_above, _at(number, index, 0.0) - number_above, total, by_number


@jit
def _interval(
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
    """Return the interval of the threshold after both rounds, as `_first_interval` without the number inside."""
    low = tl.load(rows_ptr + row * 4 + 3).to(tl.float32, bitcast=True)
    high = tl.cast(float("inf"), tl.float32)
    number_above, mass_above, total = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
    by_number = truncates_k
    if (not truncates_k) | (top_k * 4 > num_tiles * 3):
        low, high, number_above, mass_above, inside, total, by_number = _first_interval(
            sums_ptr, row, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS
        )
        if (inside > CAPACITY) & (low > -float("inf")) & ((not by_number) | (top_p >= 1.0)):
            pivot = tl.arange(0, 16)
            pivots, mass, number = _round_sums(sums_ptr, row, num_chunks, 1, MOST_CHUNKS)
            reached = mass >= top_p * total
            if by_number:
                reached = number >= top_k.to(tl.float32)
            index = tl.min(tl.where(reached, pivot, 15), 0)
            low = _at(pivots, index, 0.0)
            if index > 0:
                high = _at(pivots, index - 1, 0.0)
                number_above, mass_above = _at(number, index - 1, 0.0), _at(mass, index - 1, 0.0)
    return low, high, number_above, mass_above, total, by_number


_PER_ROW = ("temperature_ptr", "top_k_ptr", "top_p_ptr")


@kernel_with(varying=_PER_ROW)
def _pivots_kernel(
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
    """Sum number and mass of the tokens at or above each of 16 pivots, in one chunk of one row per program.

    The pivots of round 0 divide the range of scores that can matter; those of round 1 divide an interval of it with
    too many tokens. The last pivot is the lower end: -inf in round 0.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    if (ROUND == 0) & (chunk == 0):
        tl.store(rows_ptr + row * 4, 0)
    if (temperature <= 0) | ((top_p >= 1.0) & (not truncates_k)):
        return
    best = _best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
    if truncates_k & (top_k * 4 <= num_tiles * 3):
        if (ROUND == 0) & (chunk == 0):
            # The k-th largest of the tiles' maxima: k tokens are at least as large.
            tile = tl.arange(0, MOST_TILES)
            maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
            larger = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), 1)
            limit = tl.min(tl.where(larger < top_k, maxima, float("inf")), 0)
            low = tl.maximum(_divided(limit, temperature), best - 32.0)
            tl.store(rows_ptr + row * 4 + 3, low.to(tl.int32, bitcast=True))
        return
    pivot = tl.arange(0, 16)
    if ROUND == 0:
        # A token with less than (1 - p) / vocab_size of the best one's probability is removed by top-p.
        tail = tl.log(tl.cast(vocab_size, tl.float32) / tl.maximum(1.0 - top_p, 1e-8))
        span = tl.where(truncates_k, 32.0, tl.minimum(tail, 32.0))
        pivots = tl.where(pivot == 15, -float("inf"), best - (pivot + 1).to(tl.float32) * (span / 15.0))
    else:
        low, high, _, _, inside, _, by_number = _first_interval(
            sums_ptr, row, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS
        )
        if (inside <= CAPACITY) | (low == -float("inf")) | (by_number & (top_p < 1.0)):
            return
        high = tl.minimum(high, best)
        pivots = tl.maximum(high - (pivot + 1).to(tl.float32) * ((high - low) / 16.0), low)
        pivots = tl.where(pivot == 15, low, pivots)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    score = _scores_tile(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size, temperature)
    weight = tl.exp(score - best)
    reached = score[None, :] >= pivots[:, None]
    mass = tl.sum(tl.where(reached, weight[None, :], 0.0), 1)
    number = tl.sum(tl.where(reached, 1.0, 0.0), 1)
    sums_ptr += (row.to(tl.int64) * 2 + ROUND) * (1 + 2 * num_chunks) * 16
    if chunk == 0:
        tl.store(sums_ptr + pivot, pivots)
    tl.store(sums_ptr + 16 + chunk * 32 + pivot, mass)
    tl.store(sums_ptr + 32 + chunk * 32 + pivot, number)


@kernel_with(varying=_PER_ROW)
def _gather_kernel(
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
    if (temperature <= 0) | ((top_p >= 1.0) & (not truncates_k)):
        return
    low, high, _, _, _, _ = _interval(
        sums_ptr, rows_ptr, row, num_tiles, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS, CAPACITY
    )
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    for tile in range(chunk * TILES, tl.minimum((chunk + 1) * TILES, num_tiles)):
        largest = _divided(tl.load(maxima_ptr + row * num_tiles + tile), temperature)
        if (largest >= low) & (low > -float("inf")):
            token = tile * TILE + tl.arange(0, TILE)
            score = _scores_tile(row_ptr, token, vocab_size, temperature)
            inside = (score >= low) & (score < high)
            number = tl.sum(inside.to(tl.int32), 0)
            if number > 0:
                place = tl.atomic_add(rows_ptr + row * 4, number) + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(candidates_ptr + row * CAPACITY + place, token, mask=inside & (place < CAPACITY))


@jit
def _fixed(score: tl.tensor, best: tl.tensor) -> tl.tensor:
    """Return ``exp(score - best)`` as an integer, in units of 2^-44; a sum over a vocabulary fits 63 bits."""
    return (tl.exp(score - best) * 17592186044416.0).to(tl.int64)


@jit
def _largest_reaching(
    key: tl.tensor, weight: tl.tensor, least: tl.tensor, largest: tl.tensor, above: tl.tensor, target: tl.tensor
) -> tl.tensor:
    """Return the largest x for which ``above`` plus the weights of keys >= x reaches ``target``, a key or smaller.

    No key that counts is outside [least, largest]. If no x reaches the target, the result is <= least.
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
            # All keys have the same bits down to this one.
            found = found | (largest & bit)
    return found


@jit
def _number_staying(above: tl.tensor, weight: tl.tensor, target: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return how many of ``number`` tokens of equal weight stay: as many as the mass ``above`` lacks to the target."""
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
    """Return the threshold's key and the last token that stays with it, from at most SIZE candidates."""
    place = tl.arange(0, SIZE)
    listed = place < num_candidates
    token = tl.load(candidates_ptr + place, mask=listed, other=0)
    score = _scores_tile(row_ptr, token, vocab_size, temperature)
    key = _key(score)
    smallest = tl.min(tl.where(listed, key, 0xFFFFFFFF).to(tl.uint32), 0)
    largest = tl.max(tl.where(listed, key, 0).to(tl.uint32), 0)
    threshold = tl.cast(0, tl.uint32)
    last = tl.cast(vocab_size, tl.int32)
    if by_number:
        ones = listed.to(tl.int64)
        threshold = _largest_reaching(key, ones, smallest, largest, number_above.to(tl.int64), top_k.to(tl.int64))
    if top_p < 1.0:
        listed = listed & (key >= threshold)
        weight = tl.where(listed, _fixed(score, best), 0)
        # In units of 2^-44, as `_fixed`.
        above = (mass_above * 17592186044416.0).to(tl.int64)
        if by_number:
            total = (above + tl.sum(weight, 0)).to(tl.float32) * 5.684341886080802e-14
        # The best token stays even for p = 0.
        target = (tl.maximum(top_p * total, 1e-7) * 17592186044416.0).to(tl.int64)
        smallest = tl.min(tl.where(listed, key, 0xFFFFFFFF).to(tl.uint32), 0)
        # A rounded sum may miss the target; then all candidates stay.
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
    """Return number or fixed-point mass of the tokens of a row whose key is at least ``least``."""
    found = tl.cast(0, tl.int64)
    for first in range(0, vocab_size, SIZE):
        token = first + tl.arange(0, SIZE)
        score = _scores_tile(row_ptr, token, vocab_size, temperature)
        inside = (_key(score) >= least) & (token < vocab_size)
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
    """Return what `_select_candidates` returns, for a row with too many candidates, by reading all of it."""
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
        # The best token stays even for p = 0, and no sum may round above the total.
        target = tl.maximum(top_p * (total.to(tl.float32) * 5.684341886080802e-14), 1e-7) * 17592186044416.0
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
            score = _scores_tile(row_ptr, token, vocab_size, temperature)
            tied = (_key(score) == threshold) & (token < vocab_size)
            before = ties + tl.cumsum(tied.to(tl.int32), 0) - 1
            stays = tied & (above + before.to(tl.int64) * tl.maximum(_fixed(score, best), 1) < target)
            last = tl.maximum(last, tl.max(tl.where(stays, token, -1), 0))
            ties += tl.sum(tied.to(tl.int32), 0)
    return threshold, last


@kernel_with(varying=_PER_ROW)
def _select_kernel(
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

    The results are the smallest sort key that is kept, and the last token that is kept among those with exactly this
    key. A row without truncation keeps every key.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    tl.store(rows_ptr + row * 4 + 1, 0)
    tl.store(rows_ptr + row * 4 + 2, vocab_size)
    if (temperature <= 0) | ((top_p >= 1.0) & (not truncates_k)):
        return
    num_candidates = tl.load(rows_ptr + row * 4)
    if num_candidates == 0:
        return
    _low, _high, number_above, mass_above, total, by_number = _interval(
        sums_ptr, rows_ptr, row, num_tiles, num_chunks, top_k, top_p, truncates_k, MOST_CHUNKS, CAPACITY
    )
    best = _best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
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
    tl.store(rows_ptr + row * 4 + 1, threshold.to(tl.int32, bitcast=True))
    tl.store(rows_ptr + row * 4 + 2, last)


@kernel_with(varying=("temperature_ptr", "min_p_ptr", "seed_ptr", "choice_ptr", "position_ptr"))
def _draw_tiles_kernel(
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
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    MOST_TILES: tl.constexpr,
) -> None:
    """Find the largest sum of score and noise in one tile of one row per program, ties to the lowest index."""
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
        threshold = tl.load(rows_ptr + row * 4 + 1).to(tl.uint32, bitcast=True)
        largest = _divided(largest, temperature)
        best = _best_score(maxima_ptr, row, num_tiles, temperature, MOST_TILES)
        min_p = tl.load(min_p_ptr + row)
        if (_key(largest) < threshold) | (tl.exp(largest - best) < min_p):
            tl.store(sums_ptr + place, -float("inf"))
            return
    token = tile * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    logit = _logits_tile(row_ptr, token, vocab_size)
    score = _scores(logit, divisor)
    if rows_ptr is not None:
        key = _key(score)
        kept = (key > threshold) | ((key == threshold) & (token <= tl.load(rows_ptr + row * 4 + 2)))
        # Not "kept if >=": scores of +inf, whose difference is NaN, stay.
        unlikely = tl.exp(score - best) < min_p
        score = tl.where(kept & (unlikely == 0), score, -float("inf"))
    else:
        tl.store(maxima_ptr + place, tl.max(tl.where(logit == logit, logit, float("inf")), 0))
    if random:
        words = philox_words_tile(
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            tl.load(choice_ptr + row),
            tile * (TILE // 4),
            TILE,
        )
        score += gumbel_tile(words)
    sum_ = tl.max(score, 0)
    tl.store(sums_ptr + place, sum_)
    tl.store(tokens_ptr + place, tl.min(tl.where(score == sum_, token, 0x7FFFFFFF), 0))


@kernel
def _draw_rows_kernel(
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    found_ptr: tl.tensor,
    num_tiles: tl.tensor,
    MOST_TILES: tl.constexpr,
) -> None:
    """Find the best tile of one row per program, ties to the first tile; -1 if the row cannot be sampled."""
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
