"""Copies of cached blocks between device and host in one plan: out before their memory is needed, and back in.

Out: the least recently used cached blocks are copied to the host before other blocks are written there. The planner
moves as many as recent plans have taken, so that later plans find free blocks. A block that is taken earlier is copied
by the plan that takes it. If the budget of copies is used up, the block is lost.

In: a waiting request whose prefix continues on the host gets the next blocks on the device, from the front, and they
become shareable with this plan. A long prefix is copied by several plans.

* If copies delay steps, they take a part of the step's budget for prompts, according to their time. The request starts
  with the last of these plans.
* If copies overlap with steps, they take as long as a step. The request starts with the plan after them, so that no
  step waits for them.

Window blocks move like other cached blocks. On the way back, those of the tail follow the blocks of the whole prefix.

With recurrent state, KV is of use only up to the last block with a state. A block therefore moves only if its state, or
that of a block after it, is in host memory then. States move with their blocks: those at the end of a sequence and at
branches. A state in between is not copied, because requests continue after the later one. If the device still has the
KV, but a new checkpoint replaces the state, the state moves alone (`state_saves`).
"""

from collections import Counter
from math import ceil

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.memory.host_keys import CachedBlock
from scheduler_svc.core.planning.prompt_chunks import StepChunks
from scheduler_svc.core.planning.state_saves import keep_state
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import Match
from scheduler_svc.core.workers.chunks import chunk_cost
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES, BlockKey

_UNKNOWN = 8
"""Maximum number of blocks that a plan copies in one direction before a copy was measured."""

_ALONE_S = 0.05
"""Least time for copies that overlap with steps, if they delay no running request, s."""


class HostCopies:
    """The copies of cached blocks in one plan."""

    def __init__(self, worker: Worker, chunks: StepChunks) -> None:
        """Start without copies; `chunks` has the step's budget."""
        self._worker, self._chunks = worker, chunks
        self.ins: list[BlockCopy] = []
        self.outs: list[BlockCopy] = []
        self._budget: int | None = None
        """Budget tokens left for copies to the device that delay steps. Started prompts keep half of the step's budget.
        """
        self._left_s: float | None = None
        """Time left for copies to the device that overlap with the step, s."""
        self._most = 0
        """Maximum number of blocks to copy to the host."""
        if worker.pool.num_cached:
            self._most = self._affordable()
        worker.pool.max_saved = self._most

    def _affordable(self) -> int:
        """Return how many blocks the plan may copy to the host."""
        worker, space = self._worker, self._worker.swap
        space.pays = worker.costs.moves(worker.prefixes.tokens_per_cached_block, space.return_chance)
        space.overlaps = worker.costs.copies_overlap
        if not space.pays:
            return 0
        block_s = worker.costs.block_copy_s
        if space.overlaps:
            return int(max(space.planned_s, _ALONE_S) / block_s)
        return max(0, int(min(space.credit_s, space.step_s) / block_s)) if block_s else _UNKNOWN

    def restore(self, request: Request, match: Match) -> Match | None:
        """Copy the next blocks of a request's prefix back to the device.

        The caller has checked that the device has room for the whole request.

        Returns:
            The parts of the request's KV on the device. None if the request must wait for a later plan.
        """
        worker, pool, windows = self._worker, self._worker.pool, self._worker.windows
        size, num_copies = worker.rows.block_size, len(match.host) + len(match.host_tail)
        num_usable = len(match.blocks) if windows is None else windows.reach(match.blocks)
        cost = chunk_cost((match.num_blocks - num_usable) * size, num_usable * size, worker.model.break_even_context)
        if worker.checkpoints is None and not worker.costs.restores(num_copies, cost):
            return match._replace(blocks=match.blocks[:num_usable], host=NO_INDICES, host_tail=NO_INDICES)
        if worker.swap.states is not None:
            # The request may wait for a later plan, and needs the state then.
            worker.swap.states.use(worker.prefixes.last_key(request, match.num_blocks))
        overlaps = worker.costs.copies_overlap
        num_now = self._take_time(num_copies) if overlaps else self._take_budget(num_copies)
        if not num_now:
            return None
        keys, host = worker.prefixes.shareable_keys(request), match.host[:num_now]
        host_tail = match.host_tail[: num_now - len(host)]
        tail = NO_INDICES if windows is None else windows.present_tail(match.blocks, match.num_blocks)
        pool.share(match.blocks)
        pool.share(tail)
        taken = pool.take(num_now)
        blocks, in_windows = np.concatenate((match.blocks, taken[: len(host)])), taken[len(host) :]
        text = b"" if pool.cache.partial is None else request.tokens[: len(blocks) * size].tobytes()
        pool.cache.publish(keys[: KEY_BYTES * len(blocks)], blocks, text, worker.prefixes.root_key(request))
        step, answered = worker.last_step + 1, worker.answered_step
        if len(host):
            self.ins.append(worker.swap.load(host, taken[: len(host)], last_step=step, answered_step=answered))
            request.restored_tokens += len(host) * size
        if windows is not None and len(host_tail):
            positions, tables = host_tail.T
            pool.cache.restore_windows(blocks[positions], tables, in_windows)
            found = worker.swap.windows(keys, positions, tables)
            self.ins.append(worker.swap.load(found, in_windows, last_step=step, answered_step=answered))
            num_behind = match.num_blocks - int(positions[0])
            request.restored_tokens = max(request.restored_tokens, num_behind * size)
        # The window blocks first, so that they are evicted before the blocks that they are attached to.
        pool.release(np.concatenate((tail, in_windows)), last_step=step, answered_step=answered)
        pool.release(blocks, last_step=step, answered_step=answered)
        if overlaps or num_now < num_copies:
            return None
        return match._replace(blocks=blocks, host=NO_INDICES, host_tail=NO_INDICES)

    def _take_budget(self, num_blocks: int) -> int:
        """Return how many of these copies the step's budget allows, and take their cost from the budget."""
        worker = self._worker
        block_cost = worker.costs.block_copy_tokens
        if self._budget is None:
            self._budget = self._chunks.budget // 2 if worker.prefilling else self._chunks.budget
        num_now = min(num_blocks, max(1, int(self._budget / block_cost)) if block_cost else _UNKNOWN)
        cost = ceil(num_now * block_cost)
        self._budget = max(0, self._budget - cost)
        self._chunks.limit(max(1, self._chunks.budget - cost))
        return num_now

    def _take_time(self, num_blocks: int) -> int:
        """Return how many of these copies can be made during the step, and take their time."""
        worker = self._worker
        block_s = worker.costs.block_copy_s
        if self._left_s is None:
            self._left_s = max(block_s, worker.swap.planned_s)
            if not worker.rows.num_running:
                self._left_s = max(self._left_s, _ALONE_S)
        num_now = min(num_blocks, int(self._left_s / block_s))
        self._left_s -= num_now * block_s
        return num_now

    def state_restored(self) -> None:
        """Take the cost of the copy of a state to the device from the step's budget."""
        worker = self._worker
        if not worker.costs.copies_overlap:
            cost = ceil(worker.swap.state_blocks * worker.costs.block_copy_tokens)
            self._chunks.limit(max(1, self._chunks.budget - cost))

    def cancel(self) -> None:
        """Discard the budget, because no plan is made."""
        pool = self._worker.pool
        assert not pool.saved, "blocks were taken, but no plan is made"
        pool.max_saved = 0

    def move_out(self, expected_s: float) -> None:
        """Copy cached blocks to the host; the plan is otherwise complete, and its step takes `expected_s`."""
        space, pool = self._worker.swap, self._worker.pool
        pool.max_saved = 0
        saved, pool.saved = pool.saved, []
        num_moved = 0
        if self._most:
            most = min(self._most, space.pool.num_available)
            num_moved = self._save_taken(saved, most)
            if space.overlaps:
                most = min(space.pool.num_available, int(expected_s / self._worker.costs.block_copy_s))
            num_moved += self._move_ahead(max(0, most - num_moved))
        space.step_planned(expected_s, num_moved, self._worker.costs.block_copy_s)

    def _save_taken(self, saved: list[CachedBlock], most: int) -> int:
        """Copy blocks that were taken although they were in the cache; return the number of copies."""
        pool = self._worker.pool
        self._lose_twins(saved)
        missing = [each for each in self._missing(saved) if pool.is_held(each.block)][:most]
        if missing:
            self._store(missing)
        return len(missing)

    def _move_ahead(self, most: int) -> int:
        """Copy the least recently used blocks, and evict them; return the number of copies."""
        worker = self._worker
        space, pool = worker.swap, worker.pool
        short = space.reserve - pool.num_free - pool.num_retired
        left = most
        while short > 0 and pool.num_cached:
            blocks = pool.oldest_cached(min(short, left or short))
            cached = pool.cache.entries(blocks)
            missing = self._missing(cached)
            if len(missing) > left:
                break
            self._lose_twins(cached)
            if missing:
                self._store(missing)
                moved = np.array([each.block for each in missing], np.intp)
                pool.evict_after(moved, last_step=worker.last_step + 1, answered_step=worker.answered_step)
            pool.evict(blocks)
            short -= len(blocks)
            left -= len(missing)
        return most - left

    def _lose_twins(self, cached: list[CachedBlock]) -> None:
        """Record that the device loses cached blocks."""
        space = self._worker.swap
        known = [found for each in cached if (found := space.keys.get(each.entry.key)) is not None]
        if known:
            space.pool.lost_twins(np.array(known, np.intp))

    def _missing(self, cached: list[CachedBlock]) -> list[CachedBlock]:
        """Return the cached blocks that should move to the host and are not there."""
        keys = self._worker.swap.keys
        return [each for each in self._useful(cached) if keys.get(each.entry.key) is None]

    def _useful(self, cached: list[CachedBlock]) -> list[CachedBlock]:
        """Return the cached blocks that lead to a state in host memory; copy their own states there."""
        space = self._worker.swap
        if space.states is None:
            return cached
        useful: set[int] = set()
        num_after: Counter[BlockKey] = Counter()
        for each in sorted(cached, key=lambda each: 0 if each.chain is None else -each.chain.num_blocks):
            key, chain = each.entry.key, each.chain
            assert chain is not None
            num_next = num_after[key] + space.keys.num_after(key)
            has_state = space.states.use(key)
            if not has_state and chain.checkpoint >= 0 and num_next != 1:
                has_state = keep_state(self._worker, each)
            if has_state or num_next:
                useful.add(each.block)
                num_after[chain.previous] += space.keys.get(key) is None
        return [each for each in cached if each.block in useful]

    def _store(self, missing: list[CachedBlock]) -> None:
        worker = self._worker
        step, answered = worker.last_step + 1, worker.answered_step
        self.outs.append(worker.swap.store(missing, last_step=step, answered_step=answered))
