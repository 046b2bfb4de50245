"""Blocks in order of last use; memory depends on the number of blocks, not on the number of uses.

A request has hundreds of blocks, which are mostly used and evicted together. Blocks that were last used together
therefore form one *group*, and each operation takes a few array operations per affected group. A block that is used
again moves to a new group. A group is compacted when more than half of its blocks have moved.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray, all_of


@dataclass(slots=True)
class _Group:
    """Blocks that were last used together."""

    blocks: IndexArray
    """Blocks in order of their positions in a sequence. Some may have left the group."""
    num_left: int
    """Number of blocks that have not left the group."""


class RecencyQueue:
    """Distinct block numbers of [0, num_blocks), least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        """By number, least recently used first; no group is empty."""
        self._group_of = np.zeros(num_blocks, np.int64)
        """For each block, its group's number; 0 if not in the queue."""
        self._last_group = 0

    def append(self, chain: IndexArray) -> None:
        """Add blocks that are not in the queue as the most recently used ones.

        Args:
            chain: at least one block number, in order of the positions in a sequence.
        """
        self._last_group += 1
        self._group_of[chain] = self._last_group
        # Copy, because `chain` may be a view of a long table.
        self._groups[self._last_group] = _Group(chain.copy(), len(chain))

    def prepend(self, chain: IndexArray) -> None:
        """Like `append`, but as the least recently used blocks."""
        self.append(chain)
        self._groups.move_to_end(self._last_group, last=False)

    def remove(self, blocks: IndexArray) -> None:
        """Remove at least one block from the queue, in any order. All must be in it."""
        numbers = self._group_of[blocks]
        self._group_of[blocks] = 0
        if all_of(numbers == numbers[0]):
            self._shrink(numbers.item(0), len(blocks))
            return
        for number, count in np.stack(np.unique(numbers, return_counts=True), axis=1).tolist():
            self._shrink(number, count)

    def oldest(self, most: int) -> IndexArray:
        """Return some least recently used blocks, at least one and at most `most`; the queue is not empty.

        A chain's end comes before its start, because blocks after an evicted block can no longer be found.
        """
        number, group = next(iter(self._groups.items()))
        return self._present(number, group)[-most:]

    def validate(self) -> list[int]:
        """Check that no group uses too much memory; return the blocks, least recently used first."""
        found: list[int] = []
        for number, group in self._groups.items():
            present = self._present(number, group).tolist()
            assert len(present) == group.num_left > 0, "a group is miscounted"
            assert len(group.blocks) <= 2 * group.num_left, "a group holds on to blocks that have left it"
            found += reversed(present)
        assert sorted(found) == np.flatnonzero(self._group_of).tolist(), "a block is in no group"
        return found

    def _present(self, number: int, group: _Group) -> IndexArray:
        if group.num_left == len(group.blocks):
            return group.blocks
        present: IndexArray = group.blocks[self._group_of[group.blocks] == number]
        return present

    def _shrink(self, number: int, count: int) -> None:
        """Record that `count` blocks have left a group."""
        group = self._groups[number]
        group.num_left -= count
        if not group.num_left:
            del self._groups[number]
        elif 2 * group.num_left < len(group.blocks):
            group.blocks = self._present(number, group)
