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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

VICTIM_RULES = ("fewest", "youngest", "lowest_priority")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request that may be paused."""

    row: int
    rank: float
    """The policy's key; larger is less urgent."""
    sequence: int
    num_blocks: int
    num_computed: int
    """Tokens that would have to be computed again."""


def choose_victims(
    candidates: Sequence[Candidate], *, need_row: bool, need_blocks: int, rule: str, threshold: float
) -> list[int]:
    """The rows to pause, in order; empty when not even all candidates together would be enough.

    Args:
        candidates: those that may be paused.
        need_row: whether a row must become free.
        need_blocks: how many blocks must become free.
        rule: one of `VICTIM_RULES`.
        threshold: by how much a request must rank behind another one to be paused for it.
    """
    if sum(candidate.num_blocks for candidate in candidates) < need_blocks or (need_row and not candidates):
        return []
    if rule == "fewest":
        last = max((each.rank for each in candidates), default=0.0)
        enough = [each for each in candidates if each.num_blocks >= need_blocks and each.rank >= last - threshold]
        if enough and need_blocks:
            return [min(enough, key=lambda each: (-each.num_blocks, -each.rank, each.row)).row]
        if enough:
            return [min(enough, key=lambda each: (each.num_computed, -each.rank, each.row)).row]
    order: dict[str, Callable[[Candidate], tuple[float, float]]] = {
        "fewest": lambda each: (-each.num_blocks, -each.rank),
        "youngest": lambda each: (-each.sequence, 0),
        "lowest_priority": lambda each: (-each.rank, -each.sequence),
    }
    victims: list[int] = []
    for candidate in sorted(candidates, key=order[rule]):
        if victims and need_blocks <= 0:
            break
        victims.append(candidate.row)
        need_blocks -= candidate.num_blocks
    return victims
