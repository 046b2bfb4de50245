"""The counter-based generator, compared with its published vectors and with our own specification."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import philox

MASK = 0xFFFFFFFF

# Random123's known-answer vectors for philox4x32 with ten rounds, as (counter, key, result).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_the_paper(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 on Python integers, written from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """philox4x32 returns the words that Random123 publishes."""
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    words = philox.philox4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))

    assert tuple(int(word) for word in words) == expected


def test_words_follow_the_specification() -> None:
    """The word for index v is lane v % 4 of the block with counter (v // 4, position, choice, 0) and key seed."""
    seeds = [0, -1, 0x0123456789ABCDEF, -(1 << 63)]
    positions, choices = [0, 5, 2**31 - 1, 77], [0, 1, 3, 2**31 - 1]
    words = philox.random_words(torch.tensor(seeds), torch.tensor(positions).int(), torch.tensor(choices).int(), 11)
    expected = [
        [philox_by_the_paper((v // 4, position, choice, 0), (seed & MASK, seed >> 32 & MASK))[v % 4] for v in range(11)]
        for seed, position, choice in zip(seeds, positions, choices, strict=True)
    ]

    assert words.tolist() == expected


def test_words_at_chosen_indices_are_the_same_words() -> None:
    """The noise of some vocabulary indices equals their noise when all indices are computed."""
    seed, position, choice = torch.tensor([3, -9]), torch.tensor([4, 5]).int(), torch.tensor([0, 1]).int()
    index = torch.tensor([[0, 999, 17, 17], [5, 6, 7, 8]])
    everything = philox.random_words(seed, position, choice, 1000)

    assert torch.equal(philox.random_words_at(seed, position, choice, index), everything.gather(1, index))


def test_uniform_is_rounded_once_and_never_0_or_1() -> None:
    """The uniform number is (word + 1/2) / 2**32 in float32, exact for small words, and its gumbel is finite."""
    words = torch.tensor([0, 1, 511, (1 << 23) - 1, (1 << 24) + 3, 0x80000000, MASK - 512, MASK])
    exact = [(int(word) + 0.5) / 2**32 for word in words]
    uniform = philox.uniform_from_words(words)

    assert uniform.dtype == torch.float32
    assert uniform[:4].tolist() == exact[:4]
    torch.testing.assert_close(uniform.double(), torch.tensor(exact).double(), rtol=2.0**-23, atol=0)
    assert 0 < uniform.min() < uniform.max() < 1
    gumbel = philox.gumbel_from_words(words)
    torch.testing.assert_close(gumbel.double(), -torch.log(-torch.log1p(-uniform.double())))
    assert gumbel.isfinite().all()


@pytest.mark.parametrize("nats", [17.0, 19.0, 21.0])
def test_every_bit_of_a_word_makes_noise(nats: float) -> None:
    """Noise exceeds g for a share 1 - exp(-exp(-g)) of all words, so that improbable tokens are drawn."""
    low, high = 0, 1 << 32  # The noise for `low` exceeds `nats`; the noise for `high` does not.
    while high - low > 1:
        middle = (low + high) // 2
        exceeds = bool(philox.gumbel_from_words(torch.tensor([middle])) > nats)
        low, high = (middle, high) if exceeds else (low, middle)

    assert high / 2**32 == pytest.approx(-math.expm1(-math.exp(-nats)), rel=1e-6, abs=2.0**-32)


_DOUBTFUL = [57943856, 1162825344, 2708806656, 2710261760, 2714937088]


@pytest.mark.parametrize("exponent", [23, 25, 30, pytest.param(None, marks=pytest.mark.release)])
def test_gumbel_is_the_nearest_float32(exponent: int | None) -> None:
    """The gumbel is the float32 nearest to the exact value, for every uniform number but those of five words.

    Logarithms in double precision decide it: the values at twice their error on either side round to the same float32.
    The words below 2**24 have a number each; above, an exponent has 2**23 numbers. None: all of them.
    """
    doubtful: list[int] = []
    for power in (exponent,) if exponent is not None else range(23, 32):
        begin, end, step = (0, 1 << 24, 1) if power == 23 else (1 << power, 2 << power, 1 << (power - 23))
        for first in range(begin, end, step << 21):
            words = torch.arange(first, first + (step << 21), step)
            exact = -torch.log(-torch.log1p(-philox.uniform_from_words(words).double()))
            error = 2 * 2.3e-16 * (1 + exact.abs())
            doubtful += words[(exact - error).float() != (exact + error).float()].tolist()

    expected = _DOUBTFUL if exponent is None else [word for word in _DOUBTFUL if word >> exponent == 1]
    assert doubtful == expected
