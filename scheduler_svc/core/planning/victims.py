"""Victims: which running requests are preempted so that a more urgent one can run.

The default rule, `fewest`, minimises the number of preemptions. Candidates are requests that rank behind the urgent one
by more than the threshold. Of these candidates,

* only those within the threshold of the lowest-ranked one are considered, so that a victim cannot preempt another
  candidate in turn;
* one that alone frees enough is preferred. If only a row is missing, it is the one with the fewest computed tokens. If
  memory is missing, it is the largest, because the rest of a small one would soon be needed too;
* if no single one frees enough, the largest of all are taken until it is enough.

`youngest` (vLLM's recompute order) and `lowest_priority` select victims in the respective order until enough is freed.
They exist for comparison; see docs/scheduling.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array, any_of


@dataclass(frozen=True, slots=True)
class Candidates:
    """Running requests that may be preempted, as arrays of equal length."""

    rows: IndexArray
    ranks: npt.NDArray[np.float64]
    """Keys of the policy; larger is less urgent."""
    sequences: npt.NDArray[np.int64]
    num_blocks: Int32Array
    num_computed: Int32Array
    """Number of tokens to recompute after a preemption."""


def choose_victims(candidates: Candidates, *, need_blocks: int, rule: str, threshold: float) -> list[int]:
    """Return the rows to preempt, in order; empty if all candidates together are not enough.

    Args:
        candidates: the running requests that may be preempted.
        need_blocks: number of blocks that must become free; 0 if only a row is missing.
        rule: one of `VICTIM_RULES`.
        threshold: distance in rank from which on one request may preempt another.
    """
    ranks, num_blocks = candidates.ranks, candidates.num_blocks
    if int(num_blocks.sum()) < need_blocks or not len(num_blocks):
        return []
    if rule == "fewest":
        enough = (num_blocks >= need_blocks) & (ranks >= ranks.max() - threshold)
        if any_of(enough):
            first = -num_blocks if need_blocks else candidates.num_computed
            best = np.lexsort((-ranks[enough], first[enough]))[0]
            return [int(candidates.rows[enough][best])]
    order = {
        "fewest": (-ranks, -num_blocks),
        "youngest": (-candidates.sequences,),
        "lowest_priority": (-candidates.sequences, -ranks),
    }
    worst_first = np.lexsort(order[rule])
    # Select at least one victim, because a row may be all that is missing.
    freed_before = np.cumsum(num_blocks[worst_first]) - num_blocks[worst_first]
    count = max(1, int(np.count_nonzero(freed_before < need_blocks)))
    victims: list[int] = candidates.rows[worst_first[:count]].tolist()
    return victims
