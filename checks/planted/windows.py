"""Bugs in the blocks of layers with a sliding window."""

from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    both,
    with_faults,
    with_few_words,
    with_little_memory,
    with_swaps,
    with_windows,
    with_windows_on_host,
)
from checks.sim.faults import Fault
from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.memory.host_keys import HostKeys
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.memory.window_blocks import WindowBlocks, _Row
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES

_SHARED = both(with_few_words, with_windows(7))
_SWAPPED = both(with_swaps, with_windows(7, 3))
_ON_HOST = with_windows_on_host(7, 3)


@bug("window.content", "kv.exclusive", aim=with_windows(9, 3))
def period_one_block_short(patch: pytest.MonkeyPatch) -> None:
    """A row uses a block again while its window still contains the block."""

    def shorter(init: Any, self: WindowBlocks, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.period -= 1

    wrap(patch, WindowBlocks, "__init__", shorter)


@bug("window.content", "window.table", "core", aim=_SHARED)
def tail_one_block_short(patch: pytest.MonkeyPatch) -> None:
    """A request continues after a prefix whose window is not complete."""

    def shorter(init: Any, self: WindowBlocks, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.tail -= 1

    wrap(patch, WindowBlocks, "__init__", shorter)


@bug("window.content", "window.table", aim=_SHARED)
def prefix_without_a_tail(patch: pytest.MonkeyPatch) -> None:
    """A request continues after any cached block."""
    patch.setattr(WindowBlocks, "reach", lambda self, blocks: len(blocks))


@bug("window.content", "kv.exclusive", "kv.reuse", "core", aim=both(_SHARED, with_faults()))
def tail_released_one_block_early(patch: pytest.MonkeyPatch) -> None:
    """A row releases the blocks before a boundary although its next step reads the last of them."""

    def early(passed: Any, self: WindowBlocks, row: int, num_computed: int) -> IndexArray:
        found: IndexArray = passed(self, row, num_computed + self._block_size)
        return found

    wrap(patch, WindowBlocks, "passed", early)


@bug("kv.reuse", "kv.exclusive", "window.content", aim=both(with_few_words, with_little_memory, with_windows(7, 4)))
def tail_reused_before_the_result(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a window are free while steps that read them are in flight."""

    def at_once(self: Worker, rows: list[int]) -> None:
        assert self.windows is not None
        for row in rows:
            passed = self.windows.passed(row, self.rows.num_computed(row))
            self.pool.release(passed, last_step=self.answered_step, answered_step=self.answered_step)

    patch.setattr(Worker, "release_passed", at_once)


@bug("window.content", "kv.exclusive", aim=_SHARED)
def boundary_is_overwritten(patch: pytest.MonkeyPatch) -> None:
    """A row continues to use the blocks that it has attached to cached blocks."""

    def kept(self: WindowBlocks, num_shared: int, boundaries: tuple[int, ...]) -> IndexArray:
        return NO_INDICES

    patch.setattr(WindowBlocks, "_kept", kept)


@bug("kv.spoilt", "window.content", aim=both(_SHARED, with_faults(Fault.SPOILT_ROW, per_step=0.05)))
def spoilt_windows_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The window blocks of a failed row stay available."""
    patch.setattr("scheduler_svc.core.scheduler.distrust_windows", lambda worker, failed: None)


@bug("core", aim=both(with_little_memory, with_windows(9, 12)))
def steady_state_is_counted(patch: pytest.MonkeyPatch) -> None:
    """Admission counts only the blocks of the window, and not those of the longest chunk."""

    def steady(
        num_taken: Any, self: WindowBlocks, num_shared: int, num_blocks: int, boundaries: tuple[int, ...] = ()
    ) -> int:
        most = self.num_tables * (self.tail + 1)
        return int(np.minimum(num_taken(self, num_shared, num_blocks, boundaries), most))

    wrap(patch, WindowBlocks, "num_taken", steady)


@bug("core", aim=both(with_little_memory, with_windows(9, 12)))
def growth_counts_full_blocks_only(patch: pytest.MonkeyPatch) -> None:
    """A row that grows makes room for its full block, and not for its window blocks."""
    patch.setattr(Worker, "num_growth", lambda self, rows: len(rows))


@bug("window.content", "window.table", "core", "kv.exclusive", aim=with_windows(9, 12))
def growth_ends_one_position_early(patch: pytest.MonkeyPatch) -> None:
    """The last position of a row's first period takes no blocks."""

    def shorter(takes: Any, self: Any, position: int) -> bool:
        return bool(takes(self, position + 1))

    wrap(patch, _Row, "takes", shorter)


@bug("window.content", "kv.exclusive", aim=_SHARED)
def growth_overwrites_a_boundary(patch: pytest.MonkeyPatch) -> None:
    """When a row has grown by a period after a boundary, it uses the blocks of the boundary's tail again."""

    def overwriting(takes: Any, self: Any, position: int) -> bool:
        return bool(takes(self, position)) and position < self.round_end

    wrap(patch, _Row, "takes", overwriting)


@bug("core", aim=with_windows(9, 12))
def grown_windows_leak(patch: pytest.MonkeyPatch) -> None:
    """A row that leaves does not release the window blocks that it has taken since its admission."""

    def forgetful(grow: Any, self: WindowBlocks, rows: IndexArray, positions: IndexArray, taken: IndexArray) -> Any:
        rings = {row: self._rows[row].ring for row in rows.tolist()}
        found = grow(self, rows, positions, taken)
        for row, ring in rings.items():
            self._rows[row].ring = ring
        return found

    wrap(patch, WindowBlocks, "grow", forgetful)


@bug("kv.exclusive", "window.content", aim=with_windows(9, 12))
def grown_windows_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """If two rows grow in one plan, each gets the window blocks of the other."""

    def reversed_rows(
        grow: Any, self: WindowBlocks, rows: IndexArray, positions: IndexArray, taken: IndexArray
    ) -> IndexArray:
        found: IndexArray = grow(self, rows, positions, taken)
        return found[::-1] if (found >= 0).all() else found

    wrap(patch, WindowBlocks, "grow", reversed_rows)


# ---------------------------------------------------------------- windows of preempted requests


@bug("window.content", "kv.exclusive", aim=_SWAPPED)
def swapped_without_its_window(patch: pytest.MonkeyPatch) -> None:
    """The window blocks of a preempted request are not copied to the host."""

    def full_only(blocks_to_swap: Any, self: Worker, row: int) -> Any:
        blocks = blocks_to_swap(self, row)
        return None if blocks is None else blocks[: -(-self.rows.num_computed(row) // self.rows.block_size)]

    wrap(patch, Worker, "blocks_to_swap", full_only)


@bug("window.content", "window.table", aim=_SWAPPED)
def swapped_window_one_position_short(patch: pytest.MonkeyPatch) -> None:
    """The first block of the window before a preempted request's next token is left out."""

    def later(first_visible: Any, self: WindowBlocks, num_computed: int) -> int:
        first: int = first_visible(self, num_computed)
        return min(first + 1, (num_computed - 1) // self._block_size)

    wrap(patch, WindowBlocks, "first_visible", later)


@bug("window.content", "kv.exclusive", aim=_SWAPPED)
def swapped_window_in_another_group(patch: pytest.MonkeyPatch) -> None:
    """The window blocks of a preempted request are copied back to the tables of other groups."""

    def mirrored(present: Any, self: WindowBlocks, *arguments: int) -> Any:
        found = present(self, *arguments)
        return None if found is None else found[:, ::-1]

    wrap(patch, WindowBlocks, "present", mirrored)


# ---------------------------------------------------------------- windows of cached prefixes in host memory


@bug("window.content", "kv.reuse", aim=_ON_HOST)
def last_of_a_tail_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    """The last window block of a tail is attached, but its content is not copied from the host."""

    def longer(load: Any, self: SwapSpace, host: IndexArray, blocks: IndexArray, **steps: int) -> Any:
        holds_window = len(self.keys.entry(int(host[0])).key) > KEY_BYTES
        return load(self, host[:-1] if holds_window and len(host) > 1 else host, blocks, **steps)

    wrap(patch, SwapSpace, "load", longer)


@bug("window.content", aim=_ON_HOST)
def restored_to_another_table(patch: pytest.MonkeyPatch) -> None:
    """Window blocks are copied from the host to the tables of other groups."""

    def mirrored(windows: Any, self: SwapSpace, keys: bytes, positions: IndexArray, tables: IndexArray) -> IndexArray:
        found: IndexArray = windows(self, keys, positions, tables)
        if len(positions) > 1 and positions[0] == positions[1]:
            found[:2] = found[1::-1]
        return found

    wrap(patch, SwapSpace, "windows", mirrored)


@bug("window.content", aim=_ON_HOST)
def stored_under_another_table(patch: pytest.MonkeyPatch) -> None:
    """Window blocks move to the host under the key of another group."""

    def mirrored(owner: Any, self: WindowBlocks, block: int) -> tuple[int, int]:
        full, table = owner(self, block)
        return full, self.num_tables - 1 - table

    wrap(patch, WindowBlocks, "owner", mirrored)


@bug("window.content", "window.table", "core", "plan.block", aim=_ON_HOST)
def tail_in_host_memory_one_block_short(patch: pytest.MonkeyPatch) -> None:
    """A request continues after a prefix that lacks the first block of its tail on both tiers."""

    def shorter(reach: Any, self: WindowBlocks, blocks: IndexArray, keys: bytes, num_known: int, host: HostKeys) -> int:
        whole, self.tail = self.tail, max(1, self.tail - 1)
        found: int = reach(self, blocks, keys, num_known, host)
        self.tail = whole
        return found

    wrap(patch, WindowBlocks, "reach_with_host", shorter)
    wrap(patch, WindowBlocks, "missing", _only_last)


def _only_last(missing: Any, self: WindowBlocks, blocks: IndexArray, num_blocks: int) -> IndexArray:
    """Return what is missing without the first position of the tail."""
    found: IndexArray = missing(self, blocks, num_blocks)
    return found[found[:, 0] > max(0, num_blocks - self.tail)]


@bug("core", "window.content", "window.table", "plan.block", aim=_ON_HOST)
def tail_is_evicted_while_the_rest_returns(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a tail that the device has may be taken for those that are copied from the host."""
    patch.setattr(WindowBlocks, "present_tail", lambda self, blocks, num_blocks: NO_INDICES)


@bug("kv.spoilt", aim=both(with_windows_on_host(7, 3), with_faults(Fault.SPOILT_ROW, per_step=0.1)))
def spoilt_windows_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """After a row with NaN, window blocks in host memory can still be used."""

    def full_only(drop: Any, self: SwapSpace) -> None:
        keys = self.keys
        blocks = [block for block in np.flatnonzero(keys.holds).tolist() if len(keys.entry(block).key) == KEY_BYTES]
        self.pool.distrust(np.array(blocks, np.intp))

    wrap(patch, SwapSpace, "drop_cached", full_only)
