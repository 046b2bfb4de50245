"""Sampling on a GPU by radix selection, without a sort; `kernels.sampling` documents the rules.

Top-k and top-p keep the tokens at or above a *threshold*: the k-th largest score, or the score down to which the
cumulative probability reaches p. Both are the largest x for which a sum over all scores >= x reaches a target. The bits
of x are found from the top, four at a time. Each pass over the row computes the sum for each of the sixteen values of
the next four bits. Eight passes of one program per row find x exactly; the row stays in cache. Scores are compared as
*keys*: unsigned integers in the order of the floats.

If top-p cuts between equal scores, lower indices stay; one more pass finds the last token that stays. The draw applies
temperature, min-p (a comparison with the best score) and noise, on tiles of the vocabulary, followed by a reduction per
row.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import jit, kernel, kernel_with, next_power_of_2, tl
from kernels.philox import gumbel_tile, philox_words_tile
from kernels.sampling_reference import SamplingTensors

_SELECT_TILE = 1024  # logits per iteration of a program
_DRAW_TILE = 1024  # logits per program of the draw


def sample_triton(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Compute `sample` of CUDA tensors without reading a value back; ignores ``typical_p``."""
    num_rows, vocab_size = logits.shape
    if not params.any_truncation:
        return _draw(logits, params, None)
    threshold = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    last_tie = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _select_kernel[(num_rows,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        threshold,
        last_tie,
        best,
        logits.stride(0),
        vocab_size,
        TILE=min(_SELECT_TILE, next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return _draw(logits, params, (threshold, last_tie, best))


def draw_triton(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Draw from processed float32 scores ``[num_rows, vocab_size]``, without temperature and filters."""
    return _draw(scores, params, None, scaled=True)


def _draw(
    logits: torch.Tensor,
    params: SamplingTensors,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    *,
    scaled: bool = False,
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    num_tiles = -(-vocab_size // _DRAW_TILE)
    tile_score = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    tile_token = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    threshold, last_tie, best = (None, None, None) if kept is None else kept
    _draw_tiles_kernel[(num_rows, num_tiles)](
        logits,
        params.temperature,
        params.min_p,
        params.seed,
        params.choice,
        params.position,
        threshold,
        last_tie,
        best,
        tile_score,
        tile_token,
        logits.stride(0),
        vocab_size,
        num_tiles,
        TRUNCATED=kept is not None,
        SCALED=scaled,
        TILE=_DRAW_TILE,
    )
    _draw_rows_kernel[(num_rows,)](tile_score, tile_token, tokens, num_tiles, TILES=next_power_of_2(num_tiles))
    return tokens


@jit
def _scores_tile(row_ptr: tl.tensor, token: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return float32 scores divided by the temperature; -inf for NaN and outside the row; no negative zero."""
    logit = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    score = tl.div_rn(logit, tl.zeros_like(logit) + temperature) + 0.0
    return tl.where((score == score) & (token < vocab_size), score, -float("inf"))


@jit
def _key_tile(score: tl.tensor) -> tl.tensor:
    """Return unsigned integers in the order of the floats."""
    bits = score.to(tl.uint32, bitcast=True)
    # Not ~bits: some versions of the interpreter do not support it for unsigned numbers.
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _search(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    best: tl.tensor,
    least: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tuple:
    """Return the largest key x for which the sum over keys >= x (and >= ``least``) reaches ``target``.

    Also return the sum over keys > x. The sum is the number of tokens, or their mass ``exp(score - best)``.
    """
    bin_ = tl.arange(0, 16)
    found = tl.cast(0, tl.uint32)
    decided = tl.cast(0, tl.uint32)
    above = tl.cast(0.0, tl.float32)
    for step in range(8):
        shift = tl.cast(28 - 4 * step, tl.uint32)
        sums = tl.zeros((16,), tl.float32)
        for first in range(0, vocab_size, TILE):
            token = first + tl.arange(0, TILE)
            score = _scores_tile(row_ptr, token, vocab_size, temperature)
            key = _key_tile(score)
            inside = (token < vocab_size) & (key >= least) & (((key ^ found) & decided) == 0)
            weight = tl.where(inside, 1.0, 0.0)
            if BY_MASS:
                weight = tl.where(inside, tl.exp(score - best), 0.0)
            digit = ((key >> shift) & 15).to(tl.int32)
            sums += tl.sum(tl.where(digit[:, None] == bin_[None, :], weight[:, None], 0.0), 0)
        # For each digit the sum over keys at least as large; the largest digit that reaches the target is the next one.
        at_least = above + tl.sum(tl.where(bin_[:, None] >= bin_[None, :], sums[:, None], 0.0), 0)
        digit_found = tl.max(tl.where(at_least >= target, bin_, 0), 0)
        above += tl.sum(tl.where(bin_ > digit_found, sums, 0.0), 0)
        found = found | (digit_found.to(tl.uint32) << shift)
        decided = decided | (tl.cast(15, tl.uint32) << shift)
    return found, above


@kernel_with(varying=("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"))
def _select_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    last_tie_ptr: tl.tensor,
    best_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Find the tokens that sampling may choose; each program handles one row.

    The results are the smallest sort key that is kept, the last token that is kept among those with exactly this key,
    and the best score. A row without truncation keeps every key.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    truncates_k = (top_k > 0) & (top_k < vocab_size)
    tl.store(threshold_ptr + row, tl.cast(0, tl.int64))
    tl.store(last_tie_ptr + row, vocab_size)
    tl.store(best_ptr + row, 0.0)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1.0) & (min_p <= 0)):
        return
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    maxima = tl.full((TILE,), -float("inf"), tl.float32)
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        maxima = tl.maximum(maxima, _scores_tile(row_ptr, token, vocab_size, temperature))
    best = tl.max(maxima, 0)
    tl.store(best_ptr + row, best)

    least = tl.cast(0, tl.uint32)
    if truncates_k:
        least, _ = _search(row_ptr, vocab_size, temperature, best, least, top_k.to(tl.float32), False, TILE)
        tl.store(threshold_ptr + row, least.to(tl.int64))
    if top_p < 1.0:
        masses = tl.zeros((TILE,), tl.float32)
        for first in range(0, vocab_size, TILE):
            token = first + tl.arange(0, TILE)
            score = _scores_tile(row_ptr, token, vocab_size, temperature)
            masses += tl.where((_key_tile(score) >= least) & (token < vocab_size), tl.exp(score - best), 0.0)
        # The best token stays even for p = 0.
        target = tl.maximum(top_p * tl.sum(masses, 0), 1e-7)
        cut, above = _search(row_ptr, vocab_size, temperature, best, least, target, True, TILE)
        # Of the tokens at the cut, lower indices first, as many stay as the mass above the cut lacks to the target.
        ties = tl.cast(0, tl.int32)
        last = tl.cast(-1, tl.int32)
        for first in range(0, vocab_size, TILE):
            token = first + tl.arange(0, TILE)
            score = _scores_tile(row_ptr, token, vocab_size, temperature)
            tied = (_key_tile(score) == cut) & (token < vocab_size)
            before = ties + tl.cumsum(tied.to(tl.int32), 0) - 1
            stays = tied & (above + before.to(tl.float32) * tl.exp(score - best) < target)
            last = tl.maximum(last, tl.max(tl.where(stays, token, -1), 0))
            ties += tl.sum(tied.to(tl.int32), 0)
        tl.store(threshold_ptr + row, cut.to(tl.int64))
        tl.store(last_tie_ptr + row, last)


@kernel_with(varying=("temperature_ptr", "min_p_ptr", "seed_ptr", "choice_ptr", "position_ptr"))
def _draw_tiles_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    choice_ptr: tl.tensor,
    position_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    last_tie_ptr: tl.tensor,
    best_ptr: tl.tensor,
    tile_score_ptr: tl.tensor,
    tile_token_ptr: tl.tensor,
    row_stride: tl.tensor,
    vocab_size: tl.tensor,
    num_tiles: tl.tensor,
    TRUNCATED: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Find the best perturbed score in one tile of one row per program, ties to the lowest index."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    temperature = tl.load(temperature_ptr + row)
    random = temperature > 0
    divisor = 1.0
    if not SCALED:
        divisor = tl.where(random, temperature, 1.0)
    score = _scores_tile(logits_ptr + row.to(tl.int64) * row_stride, token, vocab_size, divisor)
    if random:
        if TRUNCATED:
            threshold = tl.load(threshold_ptr + row).to(tl.uint32)
            key = _key_tile(score)
            kept = (key > threshold) | ((key == threshold) & (token <= tl.load(last_tie_ptr + row)))
            kept = kept & (tl.exp(score - tl.load(best_ptr + row)) >= tl.load(min_p_ptr + row))
            score = tl.where(kept, score, -float("inf"))
        words = philox_words_tile(
            tl.load(seed_ptr + row),
            tl.load(position_ptr + row),
            tl.load(choice_ptr + row),
            tile * (TILE // 4),
            TILE,
        )
        score += gumbel_tile(words)
    best = tl.max(score, 0)
    best_token = tl.min(tl.where(score == best, token, vocab_size), 0)
    tl.store(tile_score_ptr + row * num_tiles + tile, best)
    tl.store(tile_token_ptr + row * num_tiles + tile, tl.minimum(best_token, vocab_size - 1))


@kernel
def _draw_rows_kernel(
    tile_score_ptr: tl.tensor,
    tile_token_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
) -> None:
    """Find the best tile of one row per program, ties to the first tile."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    score = tl.load(tile_score_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    best_tile = tl.min(tl.where((score == tl.max(score, 0)) & (tile < num_tiles), tile, num_tiles - 1), 0)
    tl.store(tokens_ptr + row, tl.load(tile_token_ptr + row * num_tiles + best_tile).to(tl.int64))
