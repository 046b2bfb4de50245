"""The sampling kernels: words and uniforms bit-equal to torch, draws equal to the reference."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels._triton import kernel, tl
from kernels.gpu.philox import gumbel_tile, philox_words_tile, uniform_tile
from kernels.philox import gumbel_from_words, random_words, uniform_from_words
from kernels.sampling import (
    SamplingTensors,
    greedy,
    nonfinite_rows,
    process_logits_reference,
    sample,
    sample_checked,
    sample_reference,
)
from kernels.sampling_triton import launch
from kernels.split_sampling import best_in_part, best_of_parts
from tests.examples import examples
from tests.kernels.rounding import assert_drawn, possible_scores
from tests.kernels.test_philox import KNOWN_ANSWERS


@kernel
def _noise_kernel(
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    choice_ptr: tl.tensor,
    words_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    gumbel_ptr: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program: the noise of one row's first TILE vocabulary indices."""
    row = tl.program_id(0)
    seed, position, choice = tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(choice_ptr + row)
    words = philox_words_tile(seed, position, choice, 0, TILE)
    place = row * TILE + tl.arange(0, TILE)
    tl.store(words_ptr + place, words.to(tl.int64))
    tl.store(uniform_ptr + place, uniform_tile(words))
    tl.store(gumbel_ptr + place, gumbel_tile(words))


@kernel
def _known_answer_kernel(counter_ptr: tl.tensor, seed_ptr: tl.tensor, words_ptr: tl.tensor) -> None:
    """One program: the block of one counter under one key."""
    row = tl.program_id(0)
    lane = tl.arange(0, 1)
    counter = counter_ptr + 4 * row + lane
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed_ptr + row), tl.load(counter), tl.load(counter + 1), tl.load(counter + 2), tl.load(counter + 3)
    )
    words = words_ptr + 4 * row + lane
    tl.store(words, w0.to(tl.int64))
    tl.store(words + 1, w1.to(tl.int64))
    tl.store(words + 2, w2.to(tl.int64))
    tl.store(words + 3, w3.to(tl.int64))


def signed(value: int, bits: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    return value - (1 << bits) if value >> (bits - 1) else value


def test_published_vectors() -> None:
    """tl.philox takes counter words in Random123's order and the key's low word from the seed's low half."""
    counters = torch.tensor([[signed(word, 32) for word in counter] for counter, _, _ in KNOWN_ANSWERS])
    seeds = torch.tensor([signed(key[1] << 32 | key[0], 64) for _, key, _ in KNOWN_ANSWERS])
    words = torch.zeros(len(KNOWN_ANSWERS), 4, dtype=torch.int64)
    _known_answer_kernel[(len(KNOWN_ANSWERS),)](counters.int(), seeds, words)

    assert [tuple(row) for row in words.tolist()] == [expected for _, _, expected in KNOWN_ANSWERS]


def test_noise_is_bit_equal_to_torch() -> None:
    """Words and uniforms are the same bits as in torch, the gumbel the same up to its logarithms."""
    seed = torch.tensor([0, -1, 0x0123456789ABCDEF, -(1 << 63)])
    position, choice = torch.tensor([0, 5, 2**31 - 1, 77]).int(), torch.tensor([0, 1, 3, 2**31 - 1]).int()
    words = torch.zeros(4, 256, dtype=torch.int64)
    uniform, gumbel = torch.zeros(2, 4, 256)
    _noise_kernel[(4,)](seed, position, choice, words, uniform, gumbel, TILE=256)
    expected = random_words(seed, position, choice, 256)

    assert torch.equal(words, expected)
    assert torch.equal(uniform, uniform_from_words(expected))
    torch.testing.assert_close(gumbel, gumbel_from_words(expected), rtol=1e-6, atol=2e-6)


@kernel
def _word_kernel(words_ptr: tl.tensor, uniform_ptr: tl.tensor, gumbel_ptr: tl.tensor, COUNT: tl.constexpr) -> None:
    """One program: the noise of COUNT words."""
    place = tl.arange(0, COUNT)
    words = tl.load(words_ptr + place).to(tl.uint32)
    tl.store(uniform_ptr + place, uniform_tile(words))
    tl.store(gumbel_ptr + place, gumbel_tile(words))


def test_noise_of_every_size_of_word_is_that_of_torch() -> None:
    """The smallest words, whose noise is largest, and those at each power of two: equal uniforms, near gumbels."""
    powers = [min(max((1 << power) + step, 0), (1 << 32) - 1) for power in range(33) for step in range(-3, 4)]
    words = torch.tensor((powers + [0] * 256)[:256])
    uniform, gumbel = torch.zeros(2, 256)
    _word_kernel[(1,)](words, uniform, gumbel, COUNT=256)

    assert torch.equal(uniform, uniform_from_words(words))
    torch.testing.assert_close(gumbel, gumbel_from_words(words), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [5, 1024, 2500])
def test_draws_are_the_references(vocab_size: int) -> None:
    """Greedy, unfiltered and truncating rows in one batch get the reference's tokens."""
    rows = torch.arange(8)
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 1.0, 0.0, 2.0]),
        top_k=torch.tensor([0, 0, 10, 0, 0, 3, 5, 0]).int(),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.5, 0.2, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0]),
        seed=rows * 0x1234567890ABCDE - 7,
        choice=(rows % 3).int(),
        position=(rows + 100).int(),
        any_random=True,
        any_truncation=True,
    )
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2

    assert_drawn(sample(logits, params), logits, params, noise_error=1e-5)


def test_ranks_draw_what_one_process_draws() -> None:
    """The best token over all parts of the vocabulary equals the token for the whole, for greedy and random rows."""
    rows = torch.arange(6)
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.0]),
        top_k=torch.zeros(6).int(),
        top_p=torch.ones(6),
        min_p=torch.zeros(6),
        seed=rows * 0x1234567890ABCDE - 7,
        choice=(rows % 3).int(),
        position=(rows + 100).int(),
        any_random=True,
        any_truncation=False,
    )
    logits = torch.randn(6, 2500, generator=torch.Generator().manual_seed(3)) * 2
    logits[3, :1280] = -torch.inf
    logits[4, 2000] = torch.nan
    for given_params in (params, replace(params, any_random=False)):
        parts = [best_in_part(logits[:, :1280], given_params, 0), best_in_part(logits[:, 1280:], given_params, 1280)]

        assert best_of_parts(torch.stack(parts)).tolist() == sample_checked(logits, given_params).tolist()


def test_ties_and_nan() -> None:
    """Equal logits go to the lowest index across tiles, and NaN or removed rows still give a valid index."""
    logits = torch.zeros(4, 2100)
    logits[0, [1500, 2050]] = 3.0
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    zeros = torch.zeros(4, dtype=torch.int32)
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        top_k=zeros,
        top_p=torch.ones(4),
        min_p=torch.zeros(4),
        seed=torch.zeros(4).long(),
        choice=zeros,
        position=zeros,
        any_random=True,
        any_truncation=False,
    )
    tokens = sample(logits, params)

    assert tokens[[0, 3]].tolist() == [1500, 0]
    assert ((tokens >= 0) & (tokens < 2100)).all()


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_any_parameters_give_the_tokens_of_the_reference(data: st.DataObject) -> None:
    """Any mix of parameters over any vocabulary gives the reference's tokens, with logits that are often equal too."""
    num_rows, vocab_size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([3, 40, 1024, 1500]))
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    logits = torch.randn(num_rows, vocab_size) * data.draw(st.sampled_from([0.5, 3.0, 10.0]))
    if data.draw(st.booleans()):
        logits = logits.round()
    logits = logits.to(data.draw(st.sampled_from([torch.float32, torch.float16])))

    def column(*values: float) -> torch.Tensor:
        return torch.tensor([data.draw(st.sampled_from(values)) for _ in range(num_rows)])

    params = SamplingTensors(
        temperature=column(0.0, 0.5, 1.0, 1.7).float(),
        top_k=column(0, 1, 2, 7, 100, 5000).int(),
        top_p=column(1.0, 0.95, 0.6, 0.1, 0.0).float(),
        min_p=column(0.0, 0.0, 0.03, 0.3).float(),
        seed=column(1, -5, 1 << 40).long(),
        choice=column(0, 3).int(),
        position=column(7, 99_999).int(),
        any_random=True,
        any_truncation=True,
    )
    tokens, expected = sample(logits, params), sample_reference(logits, params)
    scores = process_logits_reference(logits, params)
    for row in (tokens != expected).nonzero().flatten().tolist():
        # If a sum is rounded the other way, the border may move by one token. The sampled token must then be at the
        # border.
        border = scores[row][scores[row].isfinite()].min()
        drawn = logits[row].float() / params.temperature[row]
        assert min(abs(drawn[tokens[row]] - border), abs(drawn[expected[row]] - border)) < 0.05


def test_top_p_cuts_between_equal_logits() -> None:
    """Of equal logits those with lower indices stay, however many tiles they are spread over."""
    logits = torch.zeros(4, 1300)
    params = SamplingTensors(
        temperature=torch.ones(4),
        top_k=torch.tensor([0, 0, 30, 0]).int(),
        top_p=torch.tensor([0.0, 0.5, 0.5, 0.9999]),
        min_p=torch.zeros(4),
        seed=torch.zeros(4).long(),
        choice=torch.zeros(4).int(),
        position=torch.arange(4).int(),
        any_random=True,
        any_truncation=True,
    )
    highest = torch.zeros(4, dtype=torch.int64)
    for seed in range(8):
        draws = sample(logits, replace(params, seed=torch.full((4,), seed)))
        highest = highest.maximum(draws)

    assert highest[0] == 0
    assert 400 < highest[1] < 650
    assert 400 < highest[2] < 650, "with equal logits top-k removes nothing"
    assert highest[3] > 1000


@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_every_path_of_the_selection_keeps_what_the_reference_keeps(data: st.DataObject) -> None:
    """Small and large k, one interval and a divided one, few candidates and too many: the reference's tokens."""
    # The tiles are tiny, so that a vocabulary of a few hundred tokens takes every code path.
    with patch.multiple(launch, TILE=16, TILES_PER_PROGRAM=2, CANDIDATES=32):
        vocab_size = data.draw(st.sampled_from([15, 130]))
        torch.manual_seed(data.draw(st.integers(0, 10_000)))
        logits = torch.randn(2, vocab_size) * data.draw(st.sampled_from([0.0, 0.02, 0.5, 3.0, 30.0]))
        if data.draw(st.booleans()):
            logits = (logits * 4).round() / 4
        if data.draw(st.booleans()):
            logits[:, torch.rand(vocab_size) < 0.8] = -torch.inf
            logits[:, 7] = 0.0

        def column(*values: float) -> torch.Tensor:
            return torch.tensor([data.draw(st.sampled_from(values)) for _ in range(2)])

        params = SamplingTensors(
            temperature=column(0.0, 0.2, 1.0, 3.0).float(),
            top_k=column(0, 0, 1, 5, 40, 100, 1000).int(),
            top_p=column(1.0, 1.0, 0.999, 0.9, 0.5, 0.0).float(),
            min_p=column(0.0, 0.0, 0.1).float(),
            seed=column(1, -5, 1 << 40).long(),
            choice=column(0, 3).int(),
            position=column(7, 99_999).int(),
            any_random=True,
            any_truncation=True,
        )

        assert_drawn(sample(logits, params), logits, params, noise_error=1e-5)
        assert_kept(logits, params)


def assert_kept(logits: torch.Tensor, params: SamplingTensors) -> None:
    """Top-k and top-p keep the reference's tokens, of all that the noise could let win."""
    _, _, rows = launch.select_triton(logits, params)
    drawable = replace(params, min_p=torch.full_like(params.min_p, math.exp(-19.47)))
    scores = logits / torch.where(params.temperature > 0, params.temperature, 1.0).unsqueeze(1) + 0.0
    bits = scores.view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >= 1 << 31, bits ^ 0xFFFFFFFF, bits | 1 << 31)
    threshold, last = rows[:, 1].long().unsqueeze(1) & 0xFFFFFFFF, rows[:, 2].unsqueeze(1)
    kept = (keys > threshold) | ((keys == threshold) & (torch.arange(logits.shape[1]) <= last))
    kept &= scores - scores.amax(1, keepdim=True) >= -19.47
    # Rounding in the sum may move the border by a few tokens.
    greedy_rows = (params.temperature <= 0).unsqueeze(1)
    kept |= greedy_rows
    _, more, fewer = (scores.isfinite() | greedy_rows for scores in possible_scores(logits, drawable))
    assert (kept >= fewer).all()
    assert (kept <= more).all()


@pytest.mark.parametrize("typical_p", [None, 0.9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3, 2000])
def test_rows_that_cannot_be_sampled_get_no_token(typical_p: float | None, temperature: float, top_k: int) -> None:
    """A NaN, +inf or nothing but -inf gives -1, alone in its row, whatever the other parameters are."""
    logits = torch.randn(5, 2100)
    logits[0, 2099], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :2000] = -torch.inf
    zeros = torch.zeros(5, dtype=torch.int32)
    params = SamplingTensors(
        temperature=torch.full((5,), temperature),
        top_k=zeros + top_k,
        top_p=torch.full((5,), 0.9 if top_k else 1.0),
        min_p=torch.zeros(5),
        seed=zeros.long(),
        choice=zeros,
        position=zeros,
        any_random=temperature > 0,
        any_truncation=top_k > 0,
        typical_p=None if typical_p is None else torch.full((5,), typical_p),
    )
    tokens = sample_checked(logits, params)

    assert tokens[:3].tolist() == [-1, -1, -1]
    assert tokens[3] >= 2000
    assert 0 <= tokens[4] < 2100
    assert nonfinite_rows(logits).tolist() == [True, True, True, False, False]


def test_greedy_takes_the_first_of_the_largest() -> None:
    """Without noise one pass over the logits finds the largest, in 16 bits too."""
    logits = torch.randn(4, 5000).half()
    logits[1, [1025, 4999]] = 9.0

    assert greedy(logits).tolist() == logits.argmax(1).tolist()
