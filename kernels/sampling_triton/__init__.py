"""Sampling on a GPU without a sort and without reading a value back; `kernels.sampling` documents the rules.

Top-k and top-p keep the tokens at or above a *threshold*: the k-th largest score, or the score at which the cumulative
probability reaches p. Many programs per row read the vocabulary. One program per row then searches a short list of
*candidates*, the tokens near the threshold. This takes six kernels. Each kernel needs the results of all programs of
the previous one, and is therefore a separate launch:

1. `scores.maxima_kernel`: the largest logit of each *tile* of 1,024 tokens, and its token.
2. `candidates.pivots_kernel`, twice: number and mass of the tokens at or above each of 16 *pivots* between the best
   score and the lowest one that can matter. These sums show which interval contains the threshold. The second round
   divides an interval with too many tokens. A row with a small k skips both rounds: the k-th largest of the tile maxima
   is a lower bound, and few tokens exceed it.
3. `candidates.gather_kernel`: collects the candidates, the tokens in the interval.
4. `threshold.select_kernel`: finds the exact threshold among the candidates, bit by bit from the top.
5. `draw.draw_tiles_kernel`: applies temperature, threshold, min-p and noise. It does not read tiles whose maximum is
   below the threshold.
6. `draw.draw_rows_kernel`: the best tile of each row.

Greedy rows need only the first and the last kernel, rows without truncation only the last two. `launch` launches them.

Tokens more than 32 nats below the best token are omitted from the search: their total mass is less than the rounding
error of a float32 sum, and the noise is too small for any of them to win.

The candidates of a row are stored in no fixed order. Their masses are therefore summed as integers, and equal scores
are ordered by token index. So the same logits give the same token in every batch. Scores are compared as *keys*:
unsigned integers that sort like the floats. If the top-p threshold falls between equal scores, lower indices stay.
"""

from kernels.sampling_triton.launch import draw_best_triton, draw_triton, greedy_triton, sample_triton

__all__ = ["draw_best_triton", "draw_triton", "greedy_triton", "sample_triton"]
