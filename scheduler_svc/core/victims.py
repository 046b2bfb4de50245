"""Which running requests are paused so that a more urgent one can run.

The aim of the default rule, `fewest`: as few preemptions overall as possible. Candidates are requests that rank behind
the urgent one by more than the threshold. Of those

* a victim must not be entitled to pause another of them in its turn, so only those within the threshold of the last are
  looked at;
* one that alone frees enough is best: when only a row is missing, the one with the least computed tokens; when memory
  is, the largest, because what is left of a small one would be asked for before long;
* when no single one frees enough, the largest of all are taken until it is enough.

`youngest` (vLLM's recompute order) and `lowest_priority` take victims in their order until it is enough; they are here
to be compared with, see docs/scheduling.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.arrays import IndexArray, Int32Array, any_of

VICTIM_RULES = ("fewest", "youngest", "lowest_priority")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Running requests that may be paused: arrays of one length."""

    rows: IndexArray
    ranks: npt.NDArray[np.float64]
    """The policy's keys; larger is less urgent."""
    sequences: npt.NDArray[np.int64]
    num_blocks: Int32Array
    num_computed: Int32Array
    """Tokens that would have to be computed again."""


def choose_victims(candidates: Candidates, *, need_blocks: int, rule: str, threshold: float) -> list[int]:
    """The rows to pause, in order; empty when not even all candidates together would be enough.

    Args:
        candidates: those that may be paused.
        need_blocks: how many blocks must become free; 0: a row is all that is missing.
        rule: one of `VICTIM_RULES`.
        threshold: by how much a request must rank behind another one to be paused for it.
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
    # One victim at least: a row may be all that is missing.
    freed_before = np.cumsum(num_blocks[worst_first]) - num_blocks[worst_first]
    count = max(1, int(np.count_nonzero(freed_before < need_blocks)))
    victims: list[int] = candidates.rows[worst_first[:count]].tolist()
    return victims
