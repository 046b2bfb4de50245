"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011).

A counter-based generator is a stateless function from (key, counter) to random words. The noise for a token depends
only on the request's seed, the choice, the position and the vocabulary index. A request can therefore continue with the
same noise on another worker, in another batch, and after any interruption. This module is the specification for all
samplers.

    key      = the request's 64-bit seed: key[0] = low 32 bits, key[1] = high 32 bits
    counter  = (vocab_index // 4, position, choice, 0), four unsigned 32-bit words
               position: absolute position in its sequence of the token being sampled (prompt tokens count)
               choice:   index of the choice among the request's n choices, from 0
    words    = philox4x32(counter, key): ten rounds, the paper's multipliers and Weyl constants (as Random123)
    word     = words[vocab_index % 4]
    u        = min((word + 0.5) · 2⁻³², 1 - 2⁻²⁴)    in float32, each operation rounded to nearest
    gumbel   = the float32 nearest to -ln(-ln(1 - u))

The words are bit-equal in torch and in Triton, and so is ``u``. Small values of ``u`` produce large noise, and float32
represents small values most precisely: it holds all 32 bits of a word below 2²⁴, and 24 bits of a larger word. Without
the minimum, the largest words would round to u = 1, whose noise is -inf. The minimum affects only the smallest noise,
for one token in 2²⁵. ``u`` has about 8e7 values. For all but 5 of them, double-precision logarithms with an error of
one unit in the last place round to the same float32. The noise is thus the same on every CPU. Triton computes it in
float32, with an error of a few 1e-6.

Gumbel values lie in [-2.82, 22.88]. A token more than 25.7 nats below the best one is therefore never sampled; its
probability is below 7e-12.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LARGEST = 1 - 2.0**-24

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Compute ten rounds of Philox4x32. Each word is an int64 tensor of unsigned 32-bit values; shapes broadcast.

    torch has no 32 x 32 -> 64 bit product, but int64 multiplication wraps, so all 64 bits of the product are correct.
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


def random_words(
    seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, vocab_size: int, first: int = 0
) -> torch.Tensor:
    """Return the words for ``vocab_size`` vocabulary indices from ``first`` on; ``first`` is a multiple of 4.

    seed ``[num_rows]`` int64, position and choice ``[num_rows]`` int32; result ``[num_rows, vocab_size]`` int64 with
    unsigned 32-bit values.
    """
    num_counters = (vocab_size + 3) // 4
    group = (torch.arange(num_counters, device=seed.device, dtype=torch.int64) + first // 4).unsqueeze(0)
    words = _words_of_group(seed, position, choice, group)
    return torch.stack(words, dim=-1).view(seed.shape[0], 4 * num_counters)[:, :vocab_size]


def random_words_at(
    seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, vocab_index: torch.Tensor
) -> torch.Tensor:
    """Return the words for some vocabulary indices per row: ``vocab_index`` and result are ``[num_rows, n]`` int64.

    Equal to ``random_words(...).gather(1, vocab_index)`` at a cost proportional to ``n``.
    """
    words = torch.stack(_words_of_group(seed, position, choice, vocab_index >> 2), dim=-1)
    return words.gather(-1, (vocab_index & 3).unsqueeze(-1)).squeeze(-1)


def _words_of_group(seed: torch.Tensor, position: torch.Tensor, choice: torch.Tensor, group: torch.Tensor) -> Words:
    key = (seed & _MASK).unsqueeze(1), (seed >> 32 & _MASK).unsqueeze(1)
    row = position.to(torch.int64).unsqueeze(1), choice.to(torch.int64).unsqueeze(1)
    return philox4x32((group, row[0], row[1], torch.zeros_like(row[0])), key)


def uniform_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return ``u = min((word + 0.5) · 2⁻³², 1 - 2⁻²⁴)`` in float32; strictly between 0 and 1."""
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST)


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise in float32, finite for every word."""
    return uniform_from_words(words).double().neg_().log1p_().neg_().log_().neg_().float()
