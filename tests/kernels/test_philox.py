"""The counter-based generator against its published vectors and against its own specification."""

from __future__ import annotations

import pytest
import torch

from kernels import philox

MASK = 0xFFFFFFFF

# Random123's known-answer vectors for philox4x32 with ten rounds: counter, key, result.
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
    """The word of index v is lane v % 4 of the block with counter (v // 4, position, choice, 0) and the seed as key."""
    seeds = [0, -1, 0x0123456789ABCDEF, -(1 << 63)]
    positions, choices = [0, 5, 2**31 - 1, 77], [0, 1, 3, 2**31 - 1]
    words = philox.random_words(torch.tensor(seeds), torch.tensor(positions).int(), torch.tensor(choices).int(), 11)
    expected = [
        [philox_by_the_paper((v // 4, position, choice, 0), (seed & MASK, seed >> 32 & MASK))[v % 4] for v in range(11)]
        for seed, position, choice in zip(seeds, positions, choices, strict=True)
    ]

    assert words.tolist() == expected


def test_words_at_chosen_indices_are_the_same_words() -> None:
    """Asking for some vocabulary indices gives what asking for all of them gives there."""
    seed, position, choice = torch.tensor([3, -9]), torch.tensor([4, 5]).int(), torch.tensor([0, 1]).int()
    index = torch.tensor([[0, 999, 17, 17], [5, 6, 7, 8]])
    everything = philox.random_words(seed, position, choice, 1000)

    assert torch.equal(philox.random_words_at(seed, position, choice, index), everything.gather(1, index))


def test_uniform_is_exact_and_never_0_or_1() -> None:
    """The uniform number is exactly ((word >> 9) + 1/2) / 2**23 over its whole range, and its gumbel is finite."""
    words = torch.tensor([0, 511, 512, 0x80000000, MASK - 512, MASK])
    exact = [((int(word) >> 9) + 0.5) / 2**23 for word in words]
    uniform = philox.uniform_from_words(words)

    assert uniform.dtype == torch.float32
    assert uniform.tolist() == exact
    assert 0 < uniform.min() < uniform.max() < 1
    gumbel = philox.gumbel_from_words(words)
    torch.testing.assert_close(gumbel.double(), -torch.log(-torch.log(torch.tensor(exact).double())))
    assert gumbel.isfinite().all()


def test_gumbel_is_the_nearest_float32() -> None:
    """The gumbel is the float32 nearest to the exact value, for every uniform number but the one nearest to 1/e.

    Logarithms in double precision decide it: the values at twice their error on either side round to the same float32.
    """
    u = (torch.arange(1 << 23, dtype=torch.float64) + 0.5) * 2.0**-23
    exact = -torch.log(-torch.log(u))
    error = 2 * 2.3e-16 * (1 + exact.abs())
    doubtful = (exact - error).float() != (exact + error).float()

    assert doubtful.nonzero().flatten().tolist() == [3085996]
