"""Sampling: filters against `transformers`, the draw against its distribution."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kernels.native.library import Native, native_levels
from kernels.native.sampling import sample_native
from kernels.philox import gumbel_from_words, random_words
from kernels.sampling import (
    SamplingTensors,
    _survivors,
    greedy,
    nonfinite_rows,
    process_logits_reference,
    sample,
    sample_checked,
    sample_reference,
)
from kernels.split_sampling import best_in_part, best_of_parts
from tests.cpu_kernels import cpu_kernels
from tests.examples import examples
from tests.kernels.rounding import assert_drawn, assert_survivors


def sampling(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    seed: torch.Tensor | None = None,
    choice: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> SamplingTensors:
    """The same parameters for every row; position counts up unless given."""
    rows = torch.arange(num_rows)
    return SamplingTensors(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seed=torch.full((num_rows,), 1234) if seed is None else seed,
        choice=torch.zeros_like(rows).int() if choice is None else choice.int(),
        position=rows.int() if position is None else position.int(),
        any_random=temperature > 0,
        any_truncation=top_k > 0 or top_p < 1 or min_p > 0,
        typical_p=torch.full((num_rows,), typical_p) if typical_p < 1 else None,
    )


def by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> torch.Tensor:
    """The scores that transformers' generation samples from, its processors in its order."""
    ids = torch.LongTensor([[0]] * logits.shape[0])
    scores: torch.Tensor = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if typical_p < 1.0:
        scores = TypicalLogitsWarper(typical_p)(ids, scores)
    return scores


def as_float32(value: float) -> float:
    """``value`` rounded to float32, as the row's parameter is stored."""
    return float(torch.tensor(value))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_survivors_are_those_of_transformers(data: st.DataObject) -> None:
    """Any combination of filters keeps the scores that transformers keeps; among equal ones, the same number."""
    vocab_size = data.draw(st.integers(1, 40))
    coarse = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10000)))
    logits = torch.randn(3, vocab_size, generator=generator) * 2
    if coarse:  # many ties
        logits = logits.round()
    temperature = as_float32(data.draw(st.sampled_from([0.25, 0.7, 1.0, 1.9])))
    top_k = data.draw(st.sampled_from([0, 1, 3, 10, 100]))
    top_p = as_float32(data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.9, 0.999, 1.0])))
    min_p = as_float32(data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])))
    # Among tokens with equal scores, the sort order decides which one typical sampling keeps, in transformers too.
    typical_p = as_float32(1.0 if coarse else data.draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])))
    params = sampling(3, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)

    theirs = by_transformers(logits, temperature, top_k, top_p, min_p, typical_p)

    assert_survivors(theirs, logits, params, any_of_equals=coarse)


@pytest.mark.parametrize("vocab_size", [8, 5000])
def test_equal_logits_at_the_nucleus_border_stay_by_index(vocab_size: int) -> None:
    """Of equal logits of which only some fit, the lower indices stay, so that top_p = 0 is greedy."""
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, [1, 3, 4, 6]] = 2.0
    half = sampling(1, top_p=0.5)
    draws = {int(sample(logits, sampling(1, top_p=0.5, position=torch.tensor([p])))) for p in range(50)}

    assert process_logits_reference(logits, half).isfinite().nonzero()[:, 1].tolist() == [1, 3]
    assert draws == {1, 3}
    assert int(sample(logits, sampling(1, top_p=0.0))) == 1


def test_each_row_has_its_own_filters() -> None:
    """In one batch, each row gets its own filters, including greedy rows and rows without filters."""
    settings_of_rows = [
        (1.0, 0, 1.0, 0.0),
        (0.5, 5, 1.0, 0.0),
        (1.0, 0, 0.5, 0.0),
        (2.0, 50, 0.9, 0.1),
        (0, 3, 0.1, 0.9),
    ]
    logits = torch.randn(5, 200)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings_of_rows, strict=True))
    zeros = torch.zeros(5, dtype=torch.int32)
    params = SamplingTensors(temperature, top_k.int(), top_p, min_p, torch.zeros(5).long(), zeros, zeros, True, True)
    expected = [
        by_transformers(
            logits[row : row + 1],
            float(temperature[row]),
            int(top_k[row]),
            float(top_p[row]),
            float(min_p[row]),
        )
        for row in range(4)
    ]

    assert_survivors(torch.cat([*expected, logits[4:]]), logits, params)


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.01), (0, 0.0, 0.0)],
)
def test_cpu_path_draws_what_the_reference_draws(spread: float, top_k: int, top_p: float, min_p: float) -> None:
    """On a vocabulary too large to sort, the CPU path picks the reference's token in every row."""
    logits = torch.randn(24, 9001, generator=torch.Generator().manual_seed(5)) * spread
    params = sampling(24, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)

    assert_drawn(sample(logits, params), logits, params)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (3000, 0.9, 1e-4), (0, 1.0, 0.001)])
def test_large_vocabularies_are_filtered_alike(top_k: int, top_p: float, min_p: float) -> None:
    """Without sorting everything the same tokens survive, but for one whose sum rounds across the border."""
    logits = torch.randn(4, 9001, generator=torch.Generator().manual_seed(6)) * 3
    params = sampling(4, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = process_logits_reference(logits, params).isfinite()

    for row in range(4):
        index, scores = _survivors(logits[row], top_k, top_p, min_p)
        kept = torch.zeros(9001, dtype=torch.bool).index_fill_(0, index, True)
        assert int((kept ^ expected[row]).sum()) <= 1
        assert torch.equal(scores, logits[row, index])


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    """Temperature 0 picks the largest logit, ties to the lowest index, alone and beside random rows."""
    logits = torch.zeros(2, 100)
    logits[:, [30, 60]] = 5.0
    greedy = sampling(2, temperature=0.0)
    mixed = sampling(2)
    mixed.temperature[0] = 0.0

    assert sample(logits, greedy).tolist() == [30, 30]
    assert int(sample(logits, mixed)[0]) == 30


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.3},
        {"typical_p": 0.5},
        {"typical_p": 0.9},
        {"top_k": 8, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.8},
    ],
    ids=str,
)
def test_draws_follow_the_softmax(filters: dict[str, Any]) -> None:
    """Over 20,000 positions the frequencies pass a chi-squared test against the distribution of transformers."""
    num_draws = 20000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5, 0.25, -3.0])
    params = sampling(num_draws, temperature=0.9, **filters)
    probs = by_transformers(logits[None], 0.9, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))[0]
    probs = probs.double().softmax(0)
    counts = sample(logits.expand(num_draws, -1), params).bincount(minlength=10)

    possible = probs > 0
    assert int(counts[~possible].sum()) == 0
    expected = probs[possible] * num_draws
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty approximation for the upper 1e-4 quantile of chi-squared. The noise is fixed, so this test is
    # deterministic.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("kernels", [None, *native_levels()], ids=lambda each: each.level_name if each else "torch")
def test_a_token_of_a_probability_of_1e8_is_drawn_by_its_noise(kernels: Native | None) -> None:
    """Noise reaches 22.87, so a token 18 nats below the best one wins if its noise is large enough."""
    seed, token, noise = torch.tensor([20524]), 1552, 18.1464691
    own = random_words(seed, torch.zeros(1).int(), torch.zeros(1).int(), 4096)
    first = float(gumbel_from_words(own[:, :1]))
    for ahead, winner in ((1e-3, token), (-1e-3, 0)):
        logits = torch.full((1, 4096), -60.0)
        logits[0, 0], logits[0, token] = 0.0, first - noise + ahead
        params = sampling(1, seed=seed)
        found = sample_reference(logits, params) if kernels is None else sample_native(logits, params, kernels)
        assert found.tolist() == [winner]


@pytest.mark.parametrize("what", ["position", "choice", "seed"])
def test_neighbouring_draws_are_independent(what: str) -> None:
    """Draws at neighbouring positions, choices or seeds agree no more often than independent ones."""
    num_draws = 8000
    rows = torch.arange(num_draws)
    fixed = torch.zeros_like(rows)
    seed, position, choice = (rows if what == name else fixed for name in ("seed", "position", "choice"))
    tokens = sample(torch.zeros(num_draws, 8), sampling(num_draws, seed=seed, position=position, choice=choice))
    agreements = int((tokens[1:] == tokens[:-1]).sum())

    mean, deviation = num_draws / 8, math.sqrt(num_draws * 7 / 64)
    assert abs(agreements - mean) < 4.5 * deviation
    assert set(tokens.tolist()) == set(range(8))


def test_a_draw_does_not_depend_on_its_batch() -> None:
    """A row gives the same token alone and at another position in a batch with truncating rows."""
    logits = torch.randn(6, 5000)
    positions = torch.tensor([9, 8, 7, 6, 5, 4])
    together = sampling(6, top_k=20, position=positions)
    together.top_k[::2] = 0
    tokens = sample(logits, together)

    for row in range(6):
        this = slice(row, row + 1)
        alone = sampling(1, top_k=int(together.top_k[row]), position=positions[this])
        assert int(sample(logits[this], alone)) == int(tokens[row])


def test_rows_that_cannot_be_sampled_are_found() -> None:
    """A NaN, a +inf or nothing but -inf marks a row; removed tokens (-inf) and large logits do not."""
    logits = torch.randn(6, 50)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, 3] = 1e30

    assert nonfinite_rows(logits).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_finds_the_likeliest_token_or_none(dtype: torch.dtype) -> None:
    """The first of the largest logits, or -1 for a row that cannot be sampled."""
    logits = torch.randn(5, 50, dtype=dtype)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    logits[3, 49] = 9.0

    assert greedy(logits).tolist() == [-1, -1, -1, 49, int(logits[4].argmax())]


@pytest.mark.parametrize("vocab_size", [50, 6000])
def test_rows_without_a_valid_distribution_affect_no_other_row(vocab_size: int) -> None:
    """Rows that cannot be sampled get some valid index, and the next row gets its own token."""
    logits = torch.randn(4, vocab_size)
    params = sampling(4, top_k=10, top_p=0.9, min_p=0.01)
    healthy = sample(logits, params)
    logits[0, 7], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens = sample(logits, params)

    assert ((tokens >= 0) & (tokens < vocab_size)).all()
    assert tokens[3] == healthy[3]


def test_bfloat16_logits_are_sampled_as_float32() -> None:
    """Logits of 16 bits are widened before anything else, as transformers does."""
    logits = (torch.randn(8, 300) * 3).bfloat16()
    params = sampling(8, temperature=0.7, top_p=0.9)

    assert torch.equal(sample(logits, params), sample(logits.float(), params))


_FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 60},
    {"top_k": 3000, "top_p": 0.95},
    {"top_p": 0.0},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
@pytest.mark.parametrize("vocab_size", [1, 33, 5003])
@pytest.mark.parametrize("filters", _FILTERS, ids=str)
def test_cpu_kernels_draw_what_the_reference_draws(kernels: Native, vocab_size: int, filters: dict[str, Any]) -> None:
    """On flat, peaked and coarse logits, hot and cold, every level picks the reference's tokens."""
    for spread, temperature in ((0.0, 1.0), (0.5, 2.0), (3.0, 0.3), (9.0, 1.0)):
        logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(7)) * spread
        if spread > 5:  # many ties
            logits = logits.round()
        rows = torch.arange(6)
        params = sampling(6, temperature=temperature, seed=(rows << 60) + 5, choice=rows % 2, **filters)

        assert_drawn(sample_native(logits, params, kernels), logits, params)


@pytest.mark.parametrize("kernels", native_levels(), ids=lambda kernels: kernels.level_name)
def test_cpu_kernels_draw_from_logits_of_any_size(kernels: Native) -> None:
    """Logits that overflow when divided, that differ by less than float32 resolves, and that were removed."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(8))
    logits[0] *= 1e38
    logits[1] += 1e6
    logits[2, torch.arange(700) % 7 > 0] = -torch.inf
    logits[3] = -1e5 - logits[3].abs()
    logits[4, 5] = torch.nan
    for temperature in (1e-40, 1e-3, 1.0, 1e30):
        params = sampling(5, temperature=temperature)
        found = sample_native(logits, params, kernels).tolist()

        assert found[:4] == sample_reference(logits, params).tolist()[:4], temperature
        assert found[4] == -1


@pytest.mark.parametrize("level", ["off", *(kernels.level_name for kernels in native_levels())])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ranks_draw_what_one_process_draws(level: str, temperature: float) -> None:
    """The best token over all parts is the token of the whole vocabulary, even if parts have ties or are empty."""
    vocab_size, borders = 5003, (0, 1728, 3456, 5003)
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(7)) * 3
    logits[1] = logits[1].round()  # many ties
    logits[2, 1728:] = -torch.inf
    logits[3] = -torch.inf
    logits[4, 4000] = torch.nan
    logits[5, 2] = torch.inf
    logits[6, :4000] = -torch.inf
    rows = torch.arange(8)
    params = sampling(8, temperature=temperature, seed=(rows << 60) + 5, choice=rows % 2)
    with cpu_kernels(level):
        expected = sample_checked(logits, params)
        parts = [
            best_in_part(logits[:, begin:end].contiguous(), params, begin) for begin, end in itertools.pairwise(borders)
        ]

    assert best_of_parts(torch.stack(parts)).tolist() == expected.tolist()
    assert expected.tolist()[3:6] == [-1, -1, -1]
