"""Retention: cached blocks that requests have asked to retain for a time, on one worker.

A retained block is evicted after all cached blocks that are not retained, and after retained blocks with a lower
priority. A request retains the blocks of its sequence from the front, because a block is found only through those
before it. A block counts for one tenant. Hints of other tenants have no effect on it.

All tenants together retain at most a part of the blocks. If they ask for more, no tenant retains more than an equal
part while another one has less than it asks for. If there are more tenants than blocks, each retains at most one block,
and later tenants wait for room. The retention ends first for blocks with the lowest priority, then for
those of the request that ended first, from the end of its sequence. They stay in the cache, in order of last use.
"""

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, BoolArray, IndexArray
from shared.request_spec import MAX_RETENTION_PRIORITY


@dataclass(slots=True)
class _Record:
    """Blocks that are retained equally."""

    tenant: str
    level: int
    """The priority plus 1."""
    until: float
    """Time at which the retention ends, s."""
    blocks: IndexArray
    """In order of position. Some may have left the record."""
    num_left: int
    """Number of blocks that have not left."""


class Retention:
    """The retained blocks of one worker."""

    def __init__(self, num_blocks: int, share: float) -> None:
        """Retain nothing, and later at most the part `share` of the worker's `num_blocks`."""
        self._most = int(share * num_blocks)
        self._records: dict[int, _Record] = {}
        """By number. The records of earlier requests, and of later positions, have lower numbers."""
        self._queues: dict[tuple[str, int], OrderedDict[int, None]] = {}
        """Numbers of the records of each tenant and level, ascending; no entry is empty."""
        self._record_of = np.zeros(num_blocks, np.int64)
        """By block, the number of its record; 0 if it is not retained."""
        self._levels = np.zeros(num_blocks, np.int8)
        self._by_tenant: Counter[str] = Counter()
        """Number of retained blocks; tenants without any have no entry."""
        self._next_end = math.inf
        """Lower bound on the next time at which a retention ends, s."""
        self._last_number = 0

    def __bool__(self) -> bool:
        """Whether any block is retained."""
        return bool(self._records)

    @property
    def num_blocks(self) -> int:
        """Number of retained blocks."""
        return sum(self._by_tenant.values())

    def levels(self, blocks: IndexArray) -> IndexArray:
        """Return the level of each block: 0 if it is not retained, otherwise its priority plus 1."""
        found: IndexArray = self._levels[blocks].astype(np.intp)
        return found

    def retain(self, blocks: IndexArray, tenant: str, priority: int, until: float) -> IndexArray:
        """Retain the blocks of a sequence for a tenant, from the front, as far as it has room.

        Args:
            blocks: cached blocks in order of position.
            tenant: the tenant.
            priority: at most `MAX_RETENTION_PRIORITY`. Blocks that the tenant retains already have at least their
                former priority, and are retained at least as long.
            until: time at which the retention ends, s.

        Returns:
            Blocks whose level may have changed.
        """
        records = self._record_of[blocks]
        is_ours = np.array([not each or self._records[each].tenant == tenant for each in records.tolist()], np.bool_)
        own = blocks[is_ours]
        if not len(own):
            return own
        parts = self._parts(own, priority + 1, until)
        self._leave(own)
        room, changed = self._make_room(tenant, len(own), priority + 1)
        ends = np.cumsum([len(part) for part, _, _ in parts]).tolist()
        for end, (part, level, part_until) in reversed(list(zip(ends, parts, strict=True))):
            kept = part[: max(0, room - (end - len(part)))]
            if len(kept):
                self._add(_Record(tenant, level, part_until, kept, len(kept)))
        return np.concatenate((own, changed))

    def _parts(self, blocks: IndexArray, level: int, until: float) -> list[tuple[IndexArray, int, float]]:
        """Return runs of blocks that are to be retained equally, each with its level and its end."""
        records = self._record_of[blocks]
        starts = [0, *(np.flatnonzero(records[1:] != records[:-1]) + 1).tolist()]
        parts: list[tuple[IndexArray, int, float]] = []
        for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
            old = self._records.get(records.item(start))
            known = (level, until) if old is None else (max(level, old.level), max(until, old.until))
            parts.append((blocks[start:end], *known))
        return parts

    def _make_room(self, tenant: str, num_wanted: int, level: int) -> tuple[int, IndexArray]:
        """End the retention of other blocks; return the room for the tenant's blocks, and those other blocks."""
        wanted = self._by_tenant + Counter({tenant: num_wanted})  # Without entries of 0.
        part = max(1, _equal_part(list(wanted.values()), self._most))
        changed: list[IndexArray] = []
        for each, count in wanted.items():
            excess = count - part
            while excess > 0:
                number = self._least(each)
                if each == tenant and (not number or self._records[number].level > level):
                    num_wanted -= excess
                    break
                changed.append(self._present(number, self._records[number])[-excess:])
                self._leave(changed[-1])
                excess -= len(changed[-1])
        return max(0, min(num_wanted, self._most - self.num_blocks)), np.concatenate([NO_INDICES, *changed])

    def _least(self, tenant: str) -> int:
        """Return the number of the tenant's record whose retention ends first if room is short; 0 if it has none."""
        queues = (self._queues.get((tenant, level)) for level in range(1, MAX_RETENTION_PRIORITY + 2))
        return next((next(iter(queue)) for queue in queues if queue), 0)

    def ended(self, now: float) -> IndexArray:
        """End the retentions that are due; return their blocks."""
        if now < self._next_end:
            return NO_INDICES
        due = [self._present(number, each) for number, each in self._records.items() if each.until <= now]
        blocks = np.concatenate([NO_INDICES, *due])
        self._leave(blocks)
        self._next_end = min((each.until for each in self._records.values()), default=math.inf)
        return blocks

    def forget(self, blocks: IndexArray) -> None:
        """Record that blocks have left the cache."""
        if self._records:
            self._leave(blocks)

    def _add(self, record: _Record) -> None:
        self._last_number += 1
        self._records[self._last_number] = record
        self._queues.setdefault((record.tenant, record.level), OrderedDict())[self._last_number] = None
        self._record_of[record.blocks] = self._last_number
        self._levels[record.blocks] = record.level
        self._by_tenant[record.tenant] += record.num_left
        self._next_end = min(self._next_end, record.until)

    def _leave(self, blocks: IndexArray) -> None:
        """Take blocks out of their records."""
        records = self._record_of[blocks]
        self._record_of[blocks] = 0
        self._levels[blocks] = 0
        numbers, counts = np.unique(records, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if not number:
                continue
            record = self._records[number]
            record.num_left -= count
            self._by_tenant[record.tenant] -= count
            if not self._by_tenant[record.tenant]:
                del self._by_tenant[record.tenant]
            if not record.num_left:
                del self._records[number]
                queue = self._queues[record.tenant, record.level]
                del queue[number]
                if not queue:
                    del self._queues[record.tenant, record.level]
            elif 2 * record.num_left < len(record.blocks):
                record.blocks = self._present(number, record)

    def _present(self, number: int, record: _Record) -> IndexArray:
        is_left: BoolArray = self._record_of[record.blocks] == number
        return record.blocks[is_left]

    def validate(self) -> None:
        """Check that records, blocks and counts agree."""
        numbers, counts = np.unique(self._record_of[self._record_of > 0], return_counts=True)
        assert dict(zip(numbers.tolist(), counts.tolist(), strict=True)) == {
            number: each.num_left for number, each in self._records.items()
        }, "a retained block is in no record"
        assert {number for queue in self._queues.values() for number in queue} == set(self._records)
        by_tenant: Counter[str] = Counter()
        for number, record in self._records.items():
            present = self._present(number, record)
            assert len(present) == record.num_left > 0, "a record is miscounted"
            assert len(record.blocks) <= 2 * record.num_left
            assert (self._levels[present] == record.level).all()
            assert record.until >= self._next_end
            assert number in self._queues[record.tenant, record.level]
            by_tenant[record.tenant] += record.num_left
        assert by_tenant == self._by_tenant
        assert np.count_nonzero(self._levels) == by_tenant.total() <= self._most


def _equal_part(wanted: list[int], room: int) -> int:
    """Return the largest number such that `room` suffices if each gets what it wants, but at most this number."""
    for index, each in enumerate(sorted(wanted)):
        part = room // (len(wanted) - index)
        if each > part:
            return part
        room -= each
    return max(wanted, default=0)
