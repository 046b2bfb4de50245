"""Which cached blocks stay when memory is needed.

When the core frees a cached block cannot be seen from outside, only when it gives the block to be written again. So the
check needs two blocks: one that was given away, and one that had been unused for longer and is found later.
"""

from collections import Counter

from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.sim.coverage import Limit
from scheduler_svc.sim.promises.base import Promise, Watched
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.violation import StreamName, ViolationError

_APART = 2
"""A block is unused from some moment between the plan before the one that tells of it and the plan after it."""


class _Blocks:
    """The blocks of one worker in one epoch; steps are those in which the worker was told."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        """By row."""
        self.holders: Counter[int] = Counter()
        self.unused_since: dict[int, int] = {}
        """By block that no row holds: the step in which the last one left it."""
        self.shared: set[int] = set()
        """Blocks that were found in the cache, and were not given to be written since."""
        self.newest_evicted = 0
        """Since when a block was unused that was in the cache and is there no longer; the latest of all."""

    def leave(self, row: int, step: int) -> None:
        """A row is over."""
        for block in self.tables.pop(row):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused_since[block] = step

    def find(self, block: int) -> int | None:
        """A row shares a block; returns since when the block was unused."""
        self.holders[block] += 1
        self.shared.add(block)
        return self.unused_since.pop(block, None)

    def write(self, block: int) -> None:
        """A row is given a block to write."""
        self.holders[block] += 1
        since = self.unused_since.pop(block, 0)
        if block in self.shared:
            self.shared.discard(block)
            self.newest_evicted = max(self.newest_evicted, since)


class LeastRecentlyUsedGoFirst(Promise):
    """A block that is found in the cache was not unused for longer than one that had to leave it.

    Rows that fail, and KV that goes to the host, take blocks out of the cache for other reasons. So workers are looked
    at until their first row fails, if they have no host memory.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._applies = self.config.prefix_cache == "hash"
        self._blocks: dict[Epoch, _Blocks] = {}

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not self._applies or epoch.failed or epoch.model.num_host_blocks:
            return
        blocks = self._blocks.get(epoch)
        if blocks is None:
            for other in [each for each in self._blocks if each.is_lost]:
                del self._blocks[other]
            blocks = self._blocks[epoch] = _Blocks()
        for row in plan.leaves.tolist():
            blocks.leave(row, plan.step)
        given: list[int] = []
        newest_evicted = blocks.newest_evicted
        for admission in plan.admissions:
            table: list[int] = admission.blocks.tolist()
            num_shared = admission.num_computed_tokens // epoch.model.block_size
            blocks.tables[admission.row] = table
            for block in table[:num_shared]:
                since = blocks.find(block)
                if since is not None and newest_evicted:
                    self.seen(Limit.FOUND_AFTER_EVICTION)
                    if since + _APART <= newest_evicted:
                        what = (
                            f"block {block}, unused since step {since}, is found; one of step {newest_evicted} is gone"
                        )
                        raise ViolationError("evict.order", what, StreamName(admission.frontend, admission.stream))
            given += table[num_shared:]
        for row, block in zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True):
            blocks.tables[row].append(block)
            given.append(block)
        # A block that is shared in this plan is safe from what the same plan evicts.
        for block in given:
            blocks.write(block)
