"""Window blocks: the blocks of layers with a sliding window, which see only the newest tokens of a row.

A worker with windows has several *KV groups*. A block holds the KV of one group. The first group has the layers that
attend to all tokens; `rows` and `prefix_cache` manage its blocks. The other groups have the layers with a window. A
row has one table per group, and its tables for windows get their blocks together, one per group and position.

A row takes window blocks together with its full blocks: for its present tokens when it is admitted, and then as it
grows. It needs them for a fixed number of positions, the *period*: those that a step can reach. Later positions use
these blocks again, in turn. This is safe without waiting for results, because a worker executes plans in order and a
step writes all KV before it reads any.

A preempted row whose KV moves to host memory takes the blocks of the window before its next token with it. When it is
admitted again, it takes as many blocks for these positions, and continues like other rows.

A request can continue after a cached prefix only if the blocks of the window before its end, the *tail*, still exist.
They would be overwritten. At a *boundary* (`boundaries`), a row therefore uses other blocks from then on, and its tail
becomes cached content, attached to the full blocks with the same tokens. There are boundaries at the end of a prompt,
at the place where a prompt diverges from cached blocks (a *fork*), and where a row leaves. Attached blocks are shared,
evicted and reused like full blocks, and are lost with the full block that they are attached to.

Each attached block can move to host memory on its own, under the key of its full block and its table (`window_key`). A
tail is complete if each of its blocks is on the device or in host memory. What host memory has of a tail is copied to
new blocks, which are attached before the request starts. Of the tails in a run of tokens without a fork, only the last
two move: usually those of a prompt and of its response. The next turn continues after the response, or after the prompt
if the chat template omits a part of the response, such as its reasoning.

Invariants: a block is attached to at most one full block. Rows write only blocks that are neither shared nor attached
before they leave the window for good.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, BoolArray, IndexArray, all_of
from scheduler_svc.core.interface.plan import WindowTables
from scheduler_svc.core.memory.boundaries import Boundaries
from scheduler_svc.core.memory.host_keys import HostKeys
from shared.prefix_keys import KEY_BYTES, BlockKey

_NONE = -1
_MOVED_TAILS = 2
"""Number of tails in a run of tokens without a fork that move to host memory."""


def window_key(key: BlockKey, table: int) -> BlockKey:
    """Return the key in host memory of a window block that is attached to the full block with `key`."""
    return key + bytes((table,))


class WindowRoom(NamedTuple):
    """The window blocks of a request that is about to be admitted."""

    tail: IndexArray
    """Blocks of the cached prefix, `[positions, tables]`; negative where they must first be copied from host memory."""
    num_new: int
    """Number of further blocks to take for its present tokens."""
    most_new: int
    """The same up to its longest possible sequence."""
    boundaries: tuple[int, ...]
    """Boundaries at which the row keeps its tail, in blocks, ascending."""
    first: int = 0
    """First position for which the row takes blocks."""


@dataclass(slots=True)
class _Row:
    """The window blocks of a row."""

    first: int
    """The first position of the table."""
    table: IndexArray
    """`[positions, tables]`: blocks from `first` on. It grows with the row until no position takes blocks any more.
    Later positions repeat with the period.
    """
    ring: IndexArray
    """Blocks that the row uses until it leaves."""
    tail_positions: IndexArray
    """Positions of `tail`, ascending."""
    tail: IndexArray
    """`[positions, tables]`: blocks that the row needs until the positions are behind its window."""
    attached: IndexArray
    """Blocks that were attached when it read or wrote them: its first tail, and those at its boundaries."""
    released: int = 0
    """The row may have released the blocks of positions before this one."""
    round_end: int = 0
    """Each position before this one takes blocks."""
    replacing: frozenset[int] = frozenset()
    """Later positions that take blocks, because the blocks of a period earlier are retained for the prefix cache."""

    def takes(self, position: int) -> bool:
        """Return whether a position takes blocks instead of reusing those of a period earlier."""
        return position < self.round_end or position in self.replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSizes:
    """The sizes of a worker's windows."""

    block_size: int
    """Tokens per block."""
    window: int
    """Number of tokens that a token attends to, including itself."""
    num_tables: int
    """Number of groups with a window."""
    max_step: int
    """Maximum number of tokens of one row in a step, drafts included."""

    @property
    def tail(self) -> int:
        """Number of positions before a boundary that the tokens after it can see."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def period(self) -> int:
        """Number of positions that a step can reach."""
        return -(-(self.window + self.max_step - 2) // self.block_size) + 1

    def max_positions(self, num_blocks: int) -> int:
        """Return the number of positions of the longest sequence that fits into so many blocks of all groups."""
        reached = self.period + self.tail
        return max(min(reached, num_blocks // (1 + self.num_tables)), num_blocks - self.num_tables * reached)


class WindowBlocks(Boundaries):
    """The window blocks of one worker's rows and of its prefix cache, in one epoch."""

    def __init__(self, num_blocks: int, sizes: WindowSizes) -> None:
        """Start without rows; `num_blocks` are the worker's blocks, of all groups."""
        super().__init__()
        self._block_size = sizes.block_size
        self.window = sizes.window
        self.num_tables = num_tables = sizes.num_tables
        self.max_step = sizes.max_step
        self.tail = sizes.tail
        self.period = sizes.period
        self._attached = np.full((num_blocks, num_tables), _NONE, np.intp)
        """By full block: the window blocks with the same tokens."""
        self._owner = np.full(num_blocks, _NONE, np.intp)
        """By attached window block: the full block."""
        self._table = np.zeros(num_blocks, np.intp)
        """By attached window block: its table."""
        self.num_attached = 0
        """Number of attached window blocks."""
        self._is_boundary = np.zeros(num_blocks, np.bool_)
        """By full block: whether a tail that was attached ends with it."""
        self._rows: dict[int, _Row] = {}
        self._growing: dict[int, int] = {}
        """By row: the position from which on it takes no further blocks. Rows that have reached it are absent."""

    # ---------------------------------------------------------------- admission

    def reach(self, blocks: IndexArray) -> int:
        """Return how many leading cached blocks a request can share: those up to the last one with a tail."""
        if not self.tail or not len(blocks):
            return len(blocks)
        places = np.arange(len(blocks))
        missing = (self._attached[blocks] == _NONE).any(axis=1)
        run = places - np.maximum.accumulate(np.where(missing, places, -1))
        found = np.flatnonzero(run >= np.minimum(places + 1, self.tail))
        return int(found[-1]) + 1 if len(found) else 0

    def reach_with_host(self, blocks: IndexArray, keys: bytes, num_known: int, host: HostKeys) -> int:
        """Like `reach`, for a prefix of which host memory has a part.

        Args:
            blocks: its leading blocks that are on the device.
            keys: its joined keys.
            num_known: number of its blocks that are on the device or in host memory.
            host: keys of the blocks in host memory.
        """
        if not self.tail:
            return num_known
        on_device = self._attached[blocks] != _NONE
        end = num_known
        while end:
            # Each tail that ends after a missing position includes it, so the scan skips most of a long prefix.
            places = range(max(0, end - self.tail), end)
            lacking = (place for place in places if not self._has(place, on_device, keys, host))
            missing = next(lacking, None)
            if missing is None:
                break
            end = missing
        return end

    def _has(self, position: int, on_device: BoolArray, keys: bytes, host: HostKeys) -> bool:
        """Return whether all window blocks of a position are on the device or in host memory."""
        present = on_device[position].tolist() if position < len(on_device) else [False] * self.num_tables
        key = keys[KEY_BYTES * position : KEY_BYTES * (position + 1)]
        return all(each or host.get(window_key(key, table)) is not None for table, each in enumerate(present))

    def missing(self, blocks: IndexArray, num_blocks: int) -> IndexArray:
        """Return what the device lacks of the tail before the end of a prefix, as `[number, (position, table)]`.

        Args:
            blocks: the leading blocks of the prefix that are on the device.
            num_blocks: number of its blocks.
        """
        first = max(0, num_blocks - self.tail)
        lacks = np.ones((num_blocks - first, self.num_tables), np.bool_)
        present = blocks[first:num_blocks]
        lacks[: len(present)] = self._attached[present] == _NONE
        positions, tables = np.nonzero(lacks)
        return np.stack((first + positions, tables), axis=1)

    def present_tail(self, blocks: IndexArray, num_blocks: int) -> IndexArray:
        """Return the window blocks that the device has of the tail before the end of a prefix, see `missing`."""
        return self.attached_to(blocks[max(0, num_blocks - self.tail) :])

    def tail_of(self, blocks: IndexArray) -> IndexArray:
        """Return the window blocks `[positions, tables]` that a request needs to continue after cached blocks.

        Blocks that the device lacks are negative.
        """
        found: IndexArray = self._attached[blocks[max(0, len(blocks) - self.tail) :]]
        return found

    def first_visible(self, num_computed: int) -> int:
        """Return the first position that the token after `num_computed` tokens attends to."""
        return max(0, num_computed - self.window + 1) // self._block_size

    def num_taken(self, num_shared: int, num_blocks: int, boundaries: tuple[int, ...] = ()) -> int:
        """Return the number of blocks that a row takes up to a length.

        Args:
            num_shared: number of leading positions for which it takes none: their KV is cached, or behind the window.
            num_blocks: number of its positions.
            boundaries: boundaries at which it keeps its tail.
        """
        kept = self._kept(num_shared, boundaries)
        replaced = int(np.count_nonzero(kept + self.period < num_blocks))
        return self.num_tables * (min(num_blocks - num_shared, self.period) + replaced)

    def max_entries(self, num_tokens: int) -> int:
        """Return an upper bound on the entries in the tables of a sequence with so many tokens at admission."""
        return self.num_tables * (num_tokens // self._block_size + self.period + 1)

    def open(self, row: int, room: WindowRoom, taken: IndexArray, *, num_shared: int, num_blocks: int) -> WindowTables:
        """Give a row its window blocks, and return its tables.

        Args:
            row: the row.
            room: its room; the row has a reference to each block in the tail.
            taken: `room.num_new` blocks.
            num_shared: number of leading positions for which it takes no blocks, as in `num_taken`.
            num_blocks: number of positions of its present tokens.
        """
        kept = self._kept(num_shared, room.boundaries)
        end = num_shared + self.period
        if len(kept):
            end = max(end, int(kept[-1]) + 1 + self.period)
        length = min(end, num_blocks) - num_shared
        numbers = np.arange(length) % self.period
        num_used = min(length, self.period)
        for position in kept.tolist():
            # Later positions use another block instead of the one that is kept.
            if position + self.period < num_blocks:
                numbers[position + self.period - num_shared :: self.period] = num_used
                num_used += 1
        own = taken.reshape(num_used, self.num_tables)
        kept_numbers = numbers[kept - num_shared]
        is_kept = np.zeros(num_used, np.bool_)
        is_kept[kept_numbers] = True
        first = num_shared - len(room.tail)
        table = np.concatenate((room.tail, own[numbers]))
        self._rows[row] = _Row(
            first=first,
            table=table,
            ring=own[~is_kept].ravel(),
            tail_positions=np.concatenate((np.arange(first, num_shared), kept)),
            tail=np.concatenate((room.tail, own[kept_numbers])),
            attached=room.tail.ravel(),
            released=first,
            round_end=num_shared + self.period,
            replacing=frozenset((kept + self.period).tolist()),
        )
        if num_blocks < end:
            self._growing[row] = end
        return WindowTables(first=first, period=self.period, tables=np.ascontiguousarray(table.T))

    def _kept(self, num_shared: int, boundaries: tuple[int, ...]) -> IndexArray:
        """Return the positions in the tails of the boundaries that a row computes itself, ascending."""
        parts = [np.arange(max(num_shared, count - self.tail), count) for count in boundaries]
        return np.unique(np.concatenate(parts)) if parts else NO_INDICES

    # ---------------------------------------------------------------- running rows

    def num_growth(self, rows: IndexArray, positions: IndexArray) -> int:
        """Return the number of window blocks that rows take with their next positions.

        Args:
            rows: the rows.
            positions: the next position of each row.
        """
        if not self._growing:
            return 0
        next_positions = zip(rows.tolist(), positions.tolist(), strict=True)
        return self.num_tables * sum(row in self._growing and self._rows[row].takes(at) for row, at in next_positions)

    def grow(self, rows: IndexArray, positions: IndexArray, taken: IndexArray) -> IndexArray:
        """Extend the tables of rows by one position each; return the blocks `[rows, tables]`.

        A block of -1 means that the position reuses the block that is `period` positions earlier.

        Args:
            rows: the rows, which are distinct.
            positions: the next position of each row.
            taken: as many blocks as `num_growth` returns.
        """
        found = np.full((len(rows), self.num_tables), _NONE, np.intp)
        num_used = 0
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            end = self._growing.get(row)
            if end is None:
                continue
            own = self._rows[row]
            if own.takes(position):
                found[index] = blocks = taken[num_used : num_used + self.num_tables]
                num_used += self.num_tables
                own.ring = np.concatenate((own.ring, blocks))
            else:
                blocks = own.table[-self.period]
            own.table = np.concatenate((own.table, blocks[None]))
            if position + 1 == end:
                del self._growing[row]
        return found

    def passed(self, row: int, num_computed: int) -> IndexArray:
        """Return the blocks that no step after the plan being made reads in a row, which no longer needs them.

        Args:
            row: the row.
            num_computed: number of its tokens that are computed at least when the plan is executed.
        """
        own = self._rows[row]
        first = (num_computed - self.window + 1) // self._block_size
        num_passed = int(np.searchsorted(own.tail_positions, first))
        if not num_passed:
            return NO_INDICES
        passed = own.tail[:num_passed].ravel()
        own.released = first
        own.tail, own.tail_positions = own.tail[num_passed:], own.tail_positions[num_passed:]
        return passed

    def present(self, row: int, num_computed: int, last_written: int) -> IndexArray | None:
        """Return the blocks `[positions, tables]` of the window before a row's next token.

        Args:
            row: the row.
            num_computed: number of its tokens that are computed at least when the sent steps are done.
            last_written: the last position that these steps may write.

        Returns:
            None if these steps may overwrite some of them.
        """
        first = self.first_visible(num_computed)
        own = self._rows[row]
        if first < own.released or last_written - first >= self.period:
            return None
        return own.table[self._places(own, np.arange(first, -(-num_computed // self._block_size)))]

    def attach(self, row: int, blocks: IndexArray, *, last_written: int | None = None) -> IndexArray:
        """Attach a row's tail to cached blocks, and return the window blocks that are attached now.

        Args:
            row: the row.
            blocks: the cached blocks of the row's first tokens; the tail ends with the last one.
            last_written: the last position that sent steps may write; None at a boundary, whose tail is never written
                again.
        """
        num_blocks = len(blocks)
        first = max(0, num_blocks - self.tail)
        own = self._rows[row]
        if last_written is not None and (first < own.released or last_written - first >= self.period):
            return NO_INDICES
        full, tail = blocks[first:], own.table[self._places(own, np.arange(first, num_blocks))]
        is_new = (self._attached[full] == _NONE) & (self._owner[tail] == _NONE)
        positions, tables = np.nonzero(is_new)
        attached = self.restore(full[positions], tables, tail[is_new])
        own.attached = np.concatenate((own.attached, attached))
        self._is_boundary[full[-1:]] = True
        return attached

    def restore(self, full: IndexArray, tables: IndexArray, blocks: IndexArray) -> IndexArray:
        """Attach window blocks to full blocks that lack them, and return the window blocks.

        Args:
            full: the full block of each window block.
            tables: the table of each window block.
            blocks: the window blocks.
        """
        self._attached[full, tables] = blocks
        self._owner[blocks] = full
        self._table[blocks] = tables
        self.num_attached += len(blocks)
        return blocks

    def _places(self, own: _Row, positions: IndexArray) -> IndexArray:
        """Return the indices of positions in a row's table."""
        places, length = positions - own.first, len(own.table)
        found: IndexArray = np.where(places < length, places, length - self.period + (places - length) % self.period)
        return found

    @property
    def num_held(self) -> int:
        """Number of blocks that all rows refer to."""
        return sum(own.tail.size + own.ring.size for own in self._rows.values())

    def held(self, row: int) -> IndexArray:
        """Return the blocks that a row refers to, each once."""
        own = self._rows.get(row)
        return NO_INDICES if own is None else np.concatenate((own.tail.ravel(), own.ring))

    def suspects(self, row: int) -> IndexArray:
        """Return the blocks that a failed row has read or written, as far as requests may share them."""
        own = self._rows.get(row)
        return NO_INDICES if own is None else np.concatenate((self.held(row), own.attached))

    def leave(self, row: int) -> IndexArray:
        """Return the blocks that a row refers to, which leaves."""
        self.left(row)
        held = self.held(row)
        del self._rows[row]
        self._growing.pop(row, None)
        return held

    # ---------------------------------------------------------------- cached blocks

    def is_attached(self, blocks: IndexArray) -> BoolArray:
        """Return for each block whether it is an attached window block."""
        attached: BoolArray = self._owner[blocks] != _NONE
        return attached

    def owner(self, block: int) -> tuple[int, int]:
        """Return the full block that a window block is attached to, and its table."""
        return self._owner.item(block), self._table.item(block)

    def attached_to(self, blocks: IndexArray) -> IndexArray:
        """Return the window blocks that are attached to full blocks."""
        tails = self._attached[blocks]
        found: IndexArray = tails[tails != _NONE]
        return found

    def first_needed(self, run: IndexArray) -> int:
        """Return the first index of cached blocks without a fork from which on their window blocks are worth moving.

        They are those of the last two tails, which may have moved in part. A request that continues after an earlier
        tail would have to diverge there.
        """
        last = np.flatnonzero(self._is_boundary[run])[-_MOVED_TAILS:]
        return max(0, int(last[0]) + 1 - self.tail) if len(last) else 0

    def detach(self, blocks: IndexArray) -> IndexArray:
        """Detach window blocks, and return those that were attached."""
        gone: IndexArray = blocks[self._owner[blocks] != _NONE]
        self._attached[self._owner[gone], self._table[gone]] = _NONE
        self._owner[gone] = _NONE
        self.num_attached -= len(gone)
        return gone

    def forget(self, blocks: IndexArray) -> IndexArray:
        """Detach the window blocks of full blocks that left the cache, and return them."""
        self._is_boundary[blocks] = False
        return self.detach(self.attached_to(blocks))

    def validate(self) -> None:
        """Check that both directions of the table agree, and that no row has a block twice."""
        full, tables = np.nonzero(self._attached != _NONE)
        attached = self._attached[full, tables]
        assert all_of(self._owner[attached] == full)
        assert all_of(self._table[attached] == tables)
        assert np.count_nonzero(self._owner != _NONE) == len(full) == self.num_attached
        for row in self._rows:
            held = self.held(row)
            assert len(np.unique(held)) == len(held), "a row has a window block twice"
