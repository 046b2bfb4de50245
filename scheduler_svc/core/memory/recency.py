"""Blocks in order of last use; memory depends on the number of blocks, not on the number of uses.

A request has hundreds of blocks, which are mostly used and evicted together. Blocks that were last used together
therefore form one *group*, and each operation takes a few array operations per affected group. A block that is used
again moves to a new group. A group is compacted when more than half of its blocks have moved.

Blocks with a higher *level* come after all blocks with a lower one. A change of the level does not count as a use.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray, all_of

MAX_LEVEL = 15
"""The highest level; the lowest is 0."""
_NUM_LEVELS = MAX_LEVEL + 1


@dataclass(slots=True)
class _Group:
    """Blocks that were last used together and have the same level."""

    blocks: IndexArray
    """Blocks in order of their positions in a sequence. Some may have left the group."""
    num_left: int
    """Number of blocks that have not left the group."""


class RecencyQueue:
    """Distinct block numbers of [0, num_blocks), least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        """Groups of level 0 by number, least recently used first; no group is empty."""
        self._higher: dict[int, OrderedDict[int, _Group]] = {}
        """The same for each other level with groups."""
        self._group_of = np.zeros(num_blocks, np.int64)
        """For each block, its group's number; 0 if not in the queue. The number is the time of the last use times
        `_NUM_LEVELS`, plus the level.
        """
        self._rank_of = np.zeros(num_blocks, np.int64)
        """For each block in the queue, its place among the blocks that were last used together."""
        self._newest = 0
        """The newest time of use."""
        self._oldest = 0
        """The oldest time of use; below 0 if blocks were prepended."""

    def append(self, chain: IndexArray) -> None:
        """Add blocks that are not in the queue as the most recently used ones of level 0.

        Args:
            chain: at least one block number, in order of the positions in a sequence.
        """
        self._newest += 1
        number = self._newest * _NUM_LEVELS
        self._group_of[chain] = number
        self._rank_of[chain] = np.arange(len(chain))
        # Copy, because `chain` may be a view of a long table.
        self._groups[number] = _Group(chain.copy(), len(chain))

    def prepend(self, chain: IndexArray) -> None:
        """Like `append`, but as the least recently used blocks."""
        self._oldest -= 1
        number = self._oldest * _NUM_LEVELS
        self._group_of[chain] = number
        self._rank_of[chain] = np.arange(len(chain))
        self._groups[number] = _Group(chain.copy(), len(chain))
        self._groups.move_to_end(number, last=False)

    def set_level(self, blocks: IndexArray, level: int) -> None:
        """Move blocks in the queue to a level.

        Args:
            blocks: in any order.
            level: the level, at most `MAX_LEVEL`.
        """
        numbers = self._group_of[blocks]
        changing = np.unique(numbers[numbers % _NUM_LEVELS != level]).tolist()
        if not changing:
            return
        is_moved = np.zeros(len(self._group_of), np.bool_)
        is_moved[blocks] = True
        groups, is_ordered = self._level(level), True
        for number in changing:
            group, target = self._level(number % _NUM_LEVELS)[number], number - number % _NUM_LEVELS + level
            left = self._present(number, group)
            moved = left[is_moved[left]]
            present = self._present(target, groups[target]) if target in groups else moved[:0]
            self._group_of[moved] = target
            self._shrink(number, len(moved))
            joined = np.concatenate((present, moved))
            if len(present):
                joined = joined[np.argsort(self._rank_of[joined])]
            is_ordered &= not groups or target in groups or target > next(reversed(groups))
            groups[target] = _Group(joined, len(joined))
        if not is_ordered:
            # Once for all groups, because the retention of thousands of them may end at the same time.
            ordered = sorted(groups.items())
            groups.clear()
            groups.update(ordered)

    def levels(self, blocks: IndexArray) -> IndexArray:
        """Return the levels of blocks in the queue."""
        found: IndexArray = self._group_of[blocks] % _NUM_LEVELS
        return found

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
        groups = self._groups or self._higher[min(self._higher)]
        number, group = next(iter(groups.items()))
        return self._present(number, group)[-most:]

    def validate(self) -> list[int]:
        """Check that no group uses too much memory; return the blocks, least recently used first."""
        found: list[int] = []
        levels = [(0, self._groups), *sorted(self._higher.items())]
        assert all(groups for _, groups in levels[1:]), "a level without groups"
        for level, groups in levels:
            assert list(groups) == sorted(groups), "groups are not ordered by use"
            assert all(number % _NUM_LEVELS == level for number in groups), "a group is in the wrong level"
        for number, group in [each for _, groups in levels for each in groups.items()]:
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

    def _level(self, level: int) -> OrderedDict[int, _Group]:
        """Return the groups of a level, by number."""
        return self._groups if not level else self._higher.setdefault(level, OrderedDict())

    def _shrink(self, number: int, count: int) -> None:
        """Record that `count` blocks have left a group."""
        level = number % _NUM_LEVELS
        groups = self._groups if not level else self._higher[level]
        group = groups[number]
        group.num_left -= count
        if not group.num_left:
            del groups[number]
            if level and not groups:
                del self._higher[level]
        elif 2 * group.num_left < len(group.blocks):
            group.blocks = self._present(number, group)
