"""Which cached blocks are retained when memory is needed."""

from collections import Counter

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface.plan import Plan

_APART = 2
"""Tolerance in steps, because the exact time at which a block becomes unused is not visible."""


class _Blocks:
    """One worker's blocks in one epoch; times are step numbers."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        """Blocks by row."""
        self.holders: Counter[int] = Counter()
        self.unused_since: dict[int, int] = {}
        """For each block without a row, the step in which the last row left it."""
        self.shared: set[int] = set()
        """Blocks that were found in the cache and not reassigned to a row for writing since."""
        self.before: dict[int, int] = {}
        """For each shared block, the previous block in the sequence, without which it cannot be found."""
        self.newest_evicted = 0
        """The latest time since which an evicted block had been unused."""

    def leave(self, row: int, step: int) -> None:
        """Record that a row has ended."""
        for block in self.tables.pop(row):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused_since[block] = step

    def find(self, block: int, before: int | None) -> int | None:
        """Record that a row shares a block found after `before`; return the step since which the block was unused."""
        self.holders[block] += 1
        self.shared.add(block)
        if before is not None:
            self.before[block] = before
        return self.unused_since.pop(block, None)

    def write(self, blocks: list[int]) -> None:
        """Record that rows got blocks to write."""
        evicted = [block for block in blocks if block in self.shared]
        self.newest_evicted = max(self.newest_evicted, *map(self._found_until, evicted), 0)
        for block in blocks:
            self.holders[block] += 1
            self.unused_since.pop(block, None)
        for block in evicted:
            self._lost(block)

    def _found_until(self, block: int) -> int:
        """Return the step since which a block, or one before it, has been unused.

        A block is evicted together with the first block before it. A row that was not permitted to share the preceding
        blocks has copies of them, so these blocks may have been unused for longer.
        """
        since, before = self.unused_since.get(block, 0), self.before.get(block)
        while before is not None:
            since = min(since, self.unused_since.get(before, since))
            before = self.before.get(before)
        return since

    def _lost(self, block: int) -> None:
        """Record that a block, and the blocks found only through it, are not in the cache."""
        lost = [block]
        for each in lost:
            self.shared.discard(each)
            self.before.pop(each, None)
            lost += [after for after, before in self.before.items() if before == each]


class LeastRecentlyUsedGoFirst(Promise):
    """No block that is found in the cache was unused for longer than an evicted one.

    Failed rows and swapped-out KV remove blocks from the cache for other reasons. The check therefore covers only
    workers without host memory, until their first row failure.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        scenario = self.world.scenario
        # With recurrent state or windows, a block is found only through a boundary, which may be evicted before it.
        has_boundaries = scenario.state_bytes or scenario.windows.num_groups > 1
        self._applies = scenario.shares_prefixes and not has_boundaries and self.config.prefix_cache == "hash"
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
        newest_evicted = blocks.newest_evicted
        for admission in plan.admissions:
            table: list[int] = admission.blocks.tolist()
            num_shared = admission.num_computed_tokens // epoch.model.block_size
            blocks.tables[admission.row] = table
            for before, block in zip([None, *table], table[:num_shared], strict=False):
                since = blocks.find(block, before)
                if since is not None and newest_evicted:
                    self.seen(Limit.FOUND_AFTER_EVICTION)
                    if since + _APART <= newest_evicted:
                        what = (
                            f"block {block}, unused since step {since}, is found; one of step {newest_evicted} is gone"
                        )
                        raise ViolationError("evict.order", what, StreamName(admission.frontend, admission.stream))
            # A later admission of this plan may already share these blocks, with their new content.
            blocks.write(table[num_shared:])
        given: list[int] = []
        for row, block in zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True):
            blocks.tables[row].append(block)
            given.append(block)
        # A block shared in this plan is not evicted by the same plan.
        blocks.write(given)
