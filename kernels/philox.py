"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).

A counter-based generator is a function from (key, counter) to random words, without state. That is what lets
a request continue with the same noise on another worker, in another batch, after any interruption: the noise
of a token depends only on who asks and where. This is the specification; everything that samples uses it.

    key      = the request's 64-bit seed: key[0] = low 32 bits, key[1] = high 32 bits
    counter  = (vocab_index // 4, position, choice, 0), four unsigned 32-bit words
               position: absolute position in its sequence of the token being sampled (prompt tokens count)
               choice:   which of the n choices of the request, from 0
    words    = philox4x32(counter, key): ten rounds, the paper's multipliers and Weyl constants (as Random123)
    word     = words[vocab_index % 4]
    u        = ((word >> 9) + 0.5) · 2⁻²³            in float32
    gumbel   = the float32 nearest to -ln(-ln(u))

The words are bit-equal in torch and in Triton, and so is ``u``: ``word >> 9`` has 23 bits, hence with the
half a bit below it fills float32's 24-bit significand exactly and nothing is rounded: 2⁻²⁴ <= u <= 1 - 2⁻²⁴.
(One bit more would be rounded, at the top to u = 1, whose gumbel is infinite: in a vocabulary of 128 k that
happens to some token in 1 of 130 draws, and that token would win whatever its logit.) There are but 2²³ such
``u``, and logarithms in double precision, good to a unit in their last place, round to that float32 for all of
them but one (0.3679, whose gumbel is 2e-8 give or take 1e-15): so the noise on a CPU is the same on every
machine. Triton computes in float32 and may be off by a few 1e-6.

What follows for the draw: gumbel lies in [-2.82, 16.64], so a token more than 19.45 nats below the
best one is never drawn (its probability is below 4e-9).
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

import torch

from kernels._triton import jit, tl

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox4x32; every word is an int64 tensor holding an unsigned 32-bit value; shapes
    broadcast.

    torch has no 32 x 32 -> 64 bit product, but int64 multiplication wraps, so its 64 bits are the right ones.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = (product1 >> 32 & _MASK) ^ (c1 ^ k0)
        c1 = product1 & _MASK
        c2 = (product0 >> 32 & _MASK) ^ (c3 ^ k1)
        c3 = product0 & _MASK
        k0, k1 = k0 + _WEYL_0 & _MASK, k1 + _WEYL_1 & _MASK
    return c0, c1, c2, c3


def random_words(seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The word of every vocabulary index: ``[num_rows, vocab_size]`` int64 with unsigned 32-bit values.

    seed ``[num_rows]`` int64, position and choice ``[num_rows]`` int32.
    """
    num_counters = (vocab_size + 3) // 4
    group = torch.arange(num_counters, device=seed.device, dtype=torch.int64).unsqueeze(0)
    words = _words_of_group(seed, position, choice, group)
    return torch.stack(words, dim=-1).view(seed.shape[0], 4 * num_counters)[:, :vocab_size]


def random_words_at(
    seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, vocab_index: torch.Tensor
) -> torch.Tensor:
    """The words of some vocabulary indices of each row: ``vocab_index`` and result ``[num_rows, n]`` int64.

    Equal to ``random_words(...).gather(1, vocab_index)`` at the cost of the indices alone.
    """
    words = torch.stack(_words_of_group(seed, position, choice, vocab_index >> 2), dim=-1)
    return words.gather(-1, (vocab_index & 3).unsqueeze(-1)).squeeze(-1)


def _words_of_group(seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, group: torch.Tensor) -> Words:
    key = (seed & _MASK).unsqueeze(1), (seed >> 32 & _MASK).unsqueeze(1)
    row = position.to(torch.int64).unsqueeze(1), choice.to(torch.int64).unsqueeze(1)
    return philox4x32((group, row[0], row[1], torch.zeros_like(row[0])), key)


def uniform_from_words(words: torch.Tensor) -> torch.Tensor:
    """``u = ((word >> 9) + 0.5) · 2⁻²³`` in float32, exact; strictly between 0 and 1."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float32, finite for every word."""
    return uniform_from_words(words).double().log_().neg_().log_().neg_().float()


@jit
def philox_words_tile(
    seed: tl.tensor, position: tl.tensor, choice: tl.tensor, first_group: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """In a kernel: the uint32 words of TILE neighbouring vocabulary indices, from index ``4 * first_group``
    on.

    seed: int64 scalar; position, choice: int32 scalars; one counter serves four indices.
    """
    group = first_group + tl.arange(0, TILE // 4)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero + choice, zero)
    # join() adds an innermost dimension: [[w0, w1], [w2, w3]] per counter, read out in index order.
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE,))


@jit
def uniform_tile(words: tl.tensor) -> tl.tensor:
    """In a kernel: `uniform_from_words`."""
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2 ** -23


@jit
def gumbel_tile(words: tl.tensor) -> tl.tensor:
    """In a kernel: `gumbel_from_words`, to a few 1e-6."""
    return -tl.log(-tl.log(uniform_tile(words)))
