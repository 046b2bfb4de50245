"""Retention: cached blocks that requests have asked to retain for a time, on one worker.

A retained block is evicted after all cached blocks that are not retained, and after retained blocks with a lower
priority. A request retains the blocks of its sequence from the front, because a block is found only through those
before it.

Tenants with a common prefix may retain the same block. The block counts for the tenant that retained it first, which
*holds* it. One other tenant *waits* for the block, and holds it when the first retention ends. Until then, the higher
of both priorities applies. If several tenants wait, the highest priority stays, then the retention that ends last.

All tenants together hold at most a part of the blocks. If they ask for more, no tenant holds more than an equal
part while another one has less than it asks for. No more is lost than needed, so the parts may differ by one block, or
by one sequence with windows. If there are more tenants than blocks, each holds at most one block,
and later tenants wait for room. The retention ends first for blocks with the lowest priority, then for
those of the request that ended first, from the end of its sequence. They stay in the cache, in order of last use.
With windows, a sequence is found only through the window blocks before its end. It is retained whole, or not at all.

The retention by a session ends with the session, except for blocks that another session of the tenant retains, too.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, BoolArray, IndexArray
from shared.request_spec import MAX_RETENTION_PRIORITY

_HELD, _WAITING = 0, 1
"""Places of a record at a block."""
_STALE = 64
"""Number of stale entries tolerated in a heap, in addition to as many as there are valid ones."""


@dataclass(slots=True)
class _Record:
    """Blocks that one request retains equally."""

    number: int
    """Earlier requests, and later positions of one request, have lower numbers."""
    tenant: str
    level: int
    """The priority plus 1."""
    until: float
    """Time at which the retention ends, s."""
    blocks: IndexArray
    """In order of position. Some may have left the record."""
    session: Hashable | None
    """The session with which the retention ends; None for none or several."""
    is_whole: bool
    """Whether all blocks are lost together, because the others are of no use without the last ones."""
    counts: list[int] = field(default_factory=lambda: [0, 0])
    """Number of blocks that it holds, and for which it waits."""


class Retention:
    """The retained blocks of one worker."""

    def __init__(self, num_blocks: int, share: float) -> None:
        """Retain nothing, and later at most the part `share` of the worker's `num_blocks`."""
        self._most = int(share * num_blocks)
        self._records: dict[int, _Record] = {}
        """By number. Each has a block."""
        self._queues: dict[tuple[str, int], OrderedDict[int, None]] = {}
        """Numbers of the records of each tenant and level that hold blocks, ascending; no entry is empty."""
        self._unordered: set[tuple[str, int]] = set()
        """Tenants and levels whose numbers are not in order, because an earlier record holds blocks again."""
        self._numbers = np.zeros((2, num_blocks), np.int64)
        """By block, the numbers of the record that holds it and of the one that waits for it; 0 for none."""
        self._levels = np.zeros((2, num_blocks), np.int8)
        """The levels of these records."""
        self._by_tenant: dict[str, int] = {}
        """Number of held blocks; tenants without any have no entry."""
        self.num_blocks = 0
        """Number of retained blocks."""
        self._by_session: dict[Hashable, set[int]] = {}
        """Numbers of the records of each session; no entry is empty."""
        self._ends: list[tuple[float, int]] = []
        """Heap of the ends and numbers of records, some of which may be gone."""
        self.next_end = math.inf
        """Lower bound on the next time at which a retention ends, s; read-only."""
        self._largest: list[tuple[int, str]] = []
        """Heap of negated numbers of held blocks and tenants, some of which may be out of date."""
        self._last_number = 0

    def __bool__(self) -> bool:
        """Whether any block is retained."""
        return bool(self._records)

    def levels(self, blocks: IndexArray) -> IndexArray:
        """Return the level of each block: 0 if it is not retained, otherwise its highest priority plus 1."""
        found: IndexArray = self._levels[:, blocks].max(0).astype(np.intp)
        return found

    def retain(
        self,
        blocks: IndexArray,
        tenant: str,
        priority: int,
        until: float,
        session: Hashable | None = None,
        *,
        whole: bool = False,
    ) -> IndexArray:
        """Retain the blocks of a sequence for a tenant, from the front, as far as it has room.

        Args:
            blocks: cached blocks in order of position.
            tenant: the tenant.
            priority: at most `MAX_RETENTION_PRIORITY`. Blocks that the tenant retains already have at least their
                former priority, and are retained at least as long.
            until: time at which the retention ends, s.
            session: the session with which it ends.
            whole: whether the first blocks are of no use without the last ones. If there is no room for all, those that
                the tenant does not retain yet are not retained.

        Returns:
            Blocks whose level may have changed.
        """
        level, first_new = priority + 1, self._last_number + 1
        if not self._most:
            return NO_INDICES
        held, waiting = self._numbers[:, blocks]
        holds = self._each(held, lambda record: record is None or record.tenant == tenant)
        replaces = self._each(
            waiting,
            lambda record: record is None or record.tenant == tenant or (record.level, record.until) < (level, until),
        )
        place = np.where(holds, _HELD, _WAITING)[holds | replaces]
        own = blocks[holds | replaces]
        new: list[tuple[_Record, IndexArray, IndexArray]] = []
        for start, end in reversed(self._runs(own, place, tenant)):
            known = self._records.get(self._numbers.item(place.item(start), own.item(start)))
            if known is None or known.tenant != tenant:
                merged = level, until, session
            else:
                of = session if known.session == session else None
                merged = max(level, known.level), max(until, known.until), of
            self._last_number += 1
            record = _Record(self._last_number, tenant, *merged[:2], own[start:end], merged[2], whole)
            at, free = place[start:end], self._numbers[_HELD, own[start:end]] == 0
            self._move(record, _WAITING, own[start:end][at == _WAITING])
            self._move(record, _HELD, own[start:end][(at == _HELD) & ~free])
            new.append((record, own[start:end], own[start:end][free]))
        more = sum(len(part) for _, _, part in new)
        before = None
        if whole:
            before = sum(record.counts[_HELD] for record, _, _ in new) + self._num_above(tenant, level, first_new)
        room, lost = self._make_room(tenant, more, level, first_new, before)
        if whole and room < more:
            room = 0
        ends = np.cumsum([len(part) for _, _, part in reversed(new)]).tolist()
        for end, (record, run, part) in zip(reversed(ends), new, strict=True):
            self._move(record, _HELD, part[: max(0, room - (end - len(part)))])
            record.blocks = self._remaining(record.number, run)
        return np.concatenate((own, lost))

    def _runs(self, blocks: IndexArray, place: IndexArray, tenant: str) -> list[tuple[int, int]]:
        """Return the starts and ends of runs of blocks that are to be retained equally."""
        if not len(blocks):
            return []
        numbers = self._numbers[place, blocks]
        numbers[~self._each(numbers, lambda record: record is not None and record.tenant == tenant)] = 0
        starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
        return list(zip(starts, [*starts[1:], len(blocks)], strict=True))

    def _each(self, numbers: IndexArray, holds: Callable[[_Record | None], bool]) -> BoolArray:
        """Return for each number whether its record satisfies a condition."""
        distinct, places = np.unique(numbers, return_inverse=True)
        found: BoolArray = np.array([holds(self._records.get(each)) for each in distinct.tolist()], np.bool_)[places]
        return found

    def _make_room(
        self, tenant: str, more: int, level: int, first_new: int, before: int | None
    ) -> tuple[int, IndexArray]:
        """End the retention of other blocks, so that a tenant can hold more.

        Args:
            tenant: the tenant.
            more: number of further blocks that it asks for.
            level: their level.
            first_new: first number of the records with this request's blocks, which precede the further blocks.
            before: number of the tenant's blocks that are not lost for the further blocks; None if a part of the
                further blocks is of use.

        Returns:
            The number of further blocks for which there is room, and the blocks that were lost.
        """
        lost: list[IndexArray] = []
        is_done = False
        # Blocks that others wait for make no room when they are lost, so the parts are computed again.
        while not is_done and self.num_blocks + more > self._most:
            is_done = True
            part, above, below = self._equal_part(tenant, more)
            if before is not None and before + more > part:
                more, before, is_done = 0, None, False
                continue
            for each in above:
                excess = self._by_tenant.get(each, 0) + (more if each == tenant else 0) - part
                while excess > 0 and self.num_blocks + more > self._most:
                    record = self._least(each)
                    if each == tenant and more and self._is_kept(record, level, first_new):
                        count = min(excess, more)
                        more -= count
                    else:
                        assert record is not None
                        present = self._present(record, _HELD)
                        if not record.is_whole:
                            # Those that other tenants wait for are lost many at a time, as far as this tenant holds
                            # no less than any of the others then.
                            most = excess if len(above) > 1 else max(excess, (self._by_tenant[each] - below) // 2)
                            present = self._last(present[-most:], excess)
                        lost.append(present)
                        count = len(present)
                        self._end(present)
                    excess -= count
                    is_done = False
        return max(0, min(more, self._most - self.num_blocks)), np.concatenate([NO_INDICES, *lost])

    def _last(self, blocks: IndexArray, num_free: int) -> IndexArray:
        """Return the shortest end of blocks that contains so many for which no tenant waits; all if there are fewer."""
        is_free = self._numbers[_WAITING, blocks] == 0
        places = np.flatnonzero(is_free)
        return blocks[places[-num_free] :] if len(places) >= num_free else blocks

    def _num_above(self, tenant: str, level: int, first_new: int) -> int:
        """Return the number of blocks that a tenant's earlier records with higher levels hold."""
        levels = range(level + 1, MAX_RETENTION_PRIORITY + 2)
        numbers = (number for each in levels for number in self._queues.get((tenant, each), ()))
        return sum(self._records[number].counts[_HELD] for number in numbers if number < first_new)

    def _is_kept(self, record: _Record | None, level: int, first_new: int) -> bool:
        """Return whether further blocks have no precedence over the first record to lose blocks."""
        return record is None or record.level > level or record.number >= first_new

    def _equal_part(self, tenant: str, more: int) -> tuple[int, list[str], int]:
        """Return the number of blocks to which tenants with more are reduced, these tenants, and the next lower number.

        Args:
            tenant: a tenant that asks for further blocks.
            more: their number.
        """
        own = self._by_tenant.get(tenant, 0) + more
        short = self.num_blocks + more - self._most
        above: dict[str, None] = {}
        total, part, below = 0, 0, 0
        while self._largest or tenant not in above:
            size, other = self._largest[0] if self._largest else (0, tenant)
            if own >= -size and tenant not in above:
                size, other = -own, tenant
            elif other in above or self._by_tenant.get(other) != -size:
                heappop(self._largest)
                continue
            if -size <= part:
                below = -size
                break
            above[other] = None
            total -= size
            part = max(1, (total - short) // len(above))
        for each in above:
            if each in self._by_tenant:
                heappush(self._largest, (-self._by_tenant[each], each))
        return part, list(above), below

    def _least(self, tenant: str) -> _Record | None:
        """Return the tenant's record that loses blocks first if room is short; None if the tenant holds nothing."""
        levels = range(1, MAX_RETENTION_PRIORITY + 2)
        key = next(((tenant, level) for level in levels if (tenant, level) in self._queues), None)
        if key is None:
            return None
        if key in self._unordered:
            self._unordered.discard(key)
            self._queues[key] = OrderedDict.fromkeys(sorted(self._queues[key]))
        return self._records[next(iter(self._queues[key]))]

    def ended(self, now: float) -> IndexArray:
        """End the retentions that are due; return blocks whose level may have changed."""
        if now < self.next_end:
            return NO_INDICES
        due: dict[int, _Record] = {}
        while self._ends and self._ends[0][0] <= now:
            _, number = heappop(self._ends)
            if (record := self._records.get(number)) is not None:
                due[number] = record
        self.next_end = self._ends[0][0] if self._ends else math.inf
        return self._end_records(list(due.values()))

    def end_sessions(self, sessions: Iterable[Hashable]) -> IndexArray:
        """End the retention by sessions; return blocks whose level may have changed."""
        numbers = [number for each in sessions for number in sorted(self._by_session.get(each, ()))]
        return self._end_records([self._records[number] for number in numbers])

    def _end_records(self, records: list[_Record]) -> IndexArray:
        if not records:
            return NO_INDICES
        waiting, held = (
            np.concatenate([self._present(each, place) for each in records]) for place in (_WAITING, _HELD)
        )
        self._leave(_WAITING, waiting)
        self._end(held)
        return np.concatenate((waiting, held))

    def forget(self, blocks: IndexArray) -> None:
        """Record that blocks have left the cache."""
        if self._records:
            self._leave(_HELD, blocks)
            self._leave(_WAITING, blocks)

    def _end(self, blocks: IndexArray) -> None:
        """End the retention by the records that hold blocks. Those that wait for a block hold it now."""
        self._leave(_HELD, blocks)
        heirs = self._numbers[_WAITING, blocks]
        for number in np.unique(heirs[heirs > 0]).tolist():
            self._move(self._records[number], _HELD, blocks[heirs == number])

    def _move(self, record: _Record, place: int, blocks: IndexArray) -> None:
        """Put a record in a place of blocks, instead of the record there. A record that holds a block does not wait."""
        if not len(blocks):
            return
        self._leave(place, blocks)
        if record.number not in self._records:
            self._records[record.number] = record
            if record.session is not None:
                self._by_session.setdefault(record.session, set()).add(record.number)
            heappush(self._ends, (record.until, record.number))
            self.next_end = self._ends[0][0]
        self._numbers[place, blocks] = record.number
        self._levels[place, blocks] = record.level
        record.counts[place] += len(blocks)
        if place == _HELD:
            key = record.tenant, record.level
            queue = self._queues.setdefault(key, OrderedDict())
            if queue and next(reversed(queue)) > record.number:
                self._unordered.add(key)
            queue[record.number] = None
            self._count(record.tenant, len(blocks))
            self._leave(_WAITING, blocks[self._numbers[_WAITING, blocks] == record.number])

    def _leave(self, place: int, blocks: IndexArray) -> None:
        """Take blocks out of the records in a place."""
        numbers, counts = np.unique(self._numbers[place, blocks], return_counts=True)
        self._numbers[place, blocks] = 0
        self._levels[place, blocks] = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if not number:
                continue
            record = self._records[number]
            record.counts[place] -= count
            if place == _HELD:
                self._count(record.tenant, -count)
                if not record.counts[_HELD]:
                    key = record.tenant, record.level
                    del self._queues[key][number]
                    if not self._queues[key]:
                        del self._queues[key]
                        self._unordered.discard(key)
            if not any(record.counts):
                del self._records[number]
                if record.session is not None:
                    self._by_session[record.session].discard(number)
                    if not self._by_session[record.session]:
                        del self._by_session[record.session]
            elif 2 * sum(record.counts) < len(record.blocks):
                record.blocks = self._remaining(number, record.blocks)
        if len(self._ends) > 2 * len(self._records) + _STALE:
            self._ends = [(each.until, number) for number, each in self._records.items()]
            heapify(self._ends)

    def _count(self, tenant: str, change: int) -> None:
        """Change the number of blocks that a tenant holds."""
        self.num_blocks += change
        count = self._by_tenant.get(tenant, 0) + change
        if count:
            self._by_tenant[tenant] = count
            heappush(self._largest, (-count, tenant))
        else:
            del self._by_tenant[tenant]
        if len(self._largest) > 2 * len(self._by_tenant) + _STALE:
            self._largest = [(-count, tenant) for tenant, count in self._by_tenant.items()]
            heapify(self._largest)

    def _remaining(self, number: int, blocks: IndexArray) -> IndexArray:
        """Return those of the blocks that a record holds or waits for."""
        is_left: BoolArray = (self._numbers[:, blocks] == number).any(0)
        return blocks[is_left]

    def _present(self, record: _Record, place: int) -> IndexArray:
        """Return the blocks in one place of a record, in order of position."""
        is_left: BoolArray = self._numbers[place, record.blocks] == record.number
        return record.blocks[is_left]

    def validate(self) -> None:
        """Check that records, blocks and counts agree."""
        held, waiting = self._numbers
        assert (held[waiting > 0] > 0).all(), "a record waits for a block that is not held"
        by_tenant: dict[str, int] = {}
        for number, record in self._records.items():
            assert number == record.number
            for place in (_HELD, _WAITING):
                present = self._present(record, place)
                assert len(present) == record.counts[place] == np.count_nonzero(self._numbers[place] == number)
                assert (self._levels[place, present] == record.level).all()
            waits = self._present(record, _WAITING)
            assert all(self._records[each].tenant != record.tenant for each in held[waits].tolist())
            assert len(record.blocks) <= 2 * sum(record.counts), "a record holds on to blocks that have left it"
            assert (record.until, number) in self._ends
            assert record.until >= self.next_end
            assert (number in self._queues.get((record.tenant, record.level), ())) == (record.counts[_HELD] > 0)
            if record.counts[_HELD]:
                by_tenant[record.tenant] = by_tenant.get(record.tenant, 0) + record.counts[_HELD]
        by_session = {(each.session, number) for number, each in self._records.items() if each.session is not None}
        assert by_session == {(of, number) for of, numbers in self._by_session.items() for number in numbers}
        assert all(self._by_session.values())
        assert set(self._numbers.ravel().tolist()) - {0} == set(self._records), "a retained block is in no record"
        assert all(self._queues.values())
        assert all(list(queue) == sorted(queue) for key, queue in self._queues.items() if key not in self._unordered)
        assert self._unordered <= self._queues.keys()
        assert sum(map(len, self._queues.values())) == sum(each.counts[_HELD] > 0 for each in self._records.values())
        assert by_tenant == self._by_tenant
        assert all((-count, tenant) in self._largest for tenant, count in by_tenant.items())
        assert np.count_nonzero(self._levels[_HELD]) == sum(by_tenant.values()) == self.num_blocks <= self._most
        assert len(self._ends) <= 2 * len(self._records) + _STALE
