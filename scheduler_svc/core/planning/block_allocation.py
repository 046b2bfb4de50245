"""Blocks for rows that continue to decode, and preemption when no block is free.

If a pending result will free blocks, rows wait for these blocks. Otherwise the lowest-ranked request
is preempted: it releases its blocks, retains its tokens and its place in the queue, and continues later.
"""

from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, where
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.planning.state_saves import StateSave
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.chunks import chunk_cost
from scheduler_svc.core.workers.rows import DECODE, FREE
from scheduler_svc.core.workers.worker import Worker


class Preemption(NamedTuple):
    """A request that has left its row, and the request that needed the row or blocks."""

    request: Request
    by: Request
    """Equal to the preempted request if that request itself needed memory and ranked last."""


class BlockAllocation:
    """The blocks that one plan appends, and the rows that it preempts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._rows = worker.rows
        self._pool = worker.pool
        self.appended_rows: list[IndexArray] = []
        self.appended_blocks: list[IndexArray] = []
        """One block for each row."""
        self._appended_windows: list[IndexArray] = []
        self.swap_outs: list[BlockCopy] = []
        self.swapped_states: list[StateSave] = []
        """Recurrent states of rows that leave, which the plan copies to the host."""
        self.preempted: list[Preemption] = []
        self.out_of_memory = False
        """Whether a row needed a block when none was free or about to become free."""

    def append(self, rows: IndexArray) -> None:
        """Add one position to each row. The caller has checked that enough blocks are free."""
        blocks, windowed = self._worker.grow(rows)
        self._rows.grow(rows, blocks)
        self.appended_rows.append(rows)
        self.appended_blocks.append(blocks)
        self._appended_windows.append(windowed)

    def appended_windows(self) -> IndexArray:
        """Return the plan's column of the same name."""
        parts = self._appended_windows
        return NO_INDICES if all(not len(part) or part.max() < 0 for part in parts) else np.concatenate(parts)

    def append_by_rank(self, rows: IndexArray) -> None:
        """Add one position to each row, and preempt other rows if needed.

        Rows are handled in rank order, so a row that got a block here is never a later row's victim. Lower-ranked rows
        may get no block, or be preempted.
        """
        rows = rows[np.lexsort((self._rows.sequence[rows], self._rows.rank[rows]))]
        for index, row in enumerate(rows.tolist()):
            if self._rows.state[row] == DECODE and self._make_room_for(row):
                self.append(rows[index : index + 1])

    def preempt(self, row: int, by: Request) -> None:
        """Preempt a row for a request. Its KV and state move to host memory if that is cheaper than recomputation."""
        worker, rows = self._worker, self._rows
        num_computed = rows.num_computed(row)
        request = rows.requests[row]
        assert request is not None
        # The KV of an unfinished prompt may come from a row that is about to fail, because no sampled token has
        # verified it yet.
        may_swap = rows.state.item(row) == DECODE and not request.starts_over
        blocks = worker.blocks_to_swap(row) if may_swap else None
        if (
            blocks is not None
            and worker.swap.has_room(len(blocks))
            and worker.swap.has_room_for_state(worker.last_step + 1)
            and worker.has_present_state(row)
            and worker.costs.swaps(len(blocks) + worker.swap.state_blocks, self._cost_of(num_computed))
        ):
            request, copy = worker.swap_out(row, blocks)
            self.swap_outs.append(copy)
            assert request.swapped is not None
            if request.swapped.state is not None:
                self.swapped_states.append(StateSave(row, num_computed, request.swapped.state))
            worker.counters.swapped += 1
        else:
            request = worker.preempt(row)
        self.preempted.append(Preemption(request, by))
        worker.counters.preemptions += 1

    def _make_room_for(self, row: int) -> bool:
        """Make the blocks for one more position of `row` available.

        Returns:
            False if `row` must wait for results or was preempted itself.
        """
        num_needed = self._worker.num_growth(np.array([row], np.intp))
        while self._pool.num_available < num_needed:
            if self._pool.num_retired:
                return False
            self.out_of_memory = True
            victim = self._victim_for(row)
            if victim is None:
                return False
            num_tokens = self._cost_of(self._rows.num_computed(victim))
            cost = self._worker.costs.recompute_steps(num_tokens, self._rows.num_running)
            self._worker.capacity.preempted(cost)
            needy = self._rows.requests[row]
            assert needy is not None
            self.preempt(victim, needy)
            if victim == row:
                return False
        return True

    def _cost_of(self, num_tokens: int) -> int:
        """Return the budget tokens for recomputing a request."""
        return chunk_cost(num_tokens, num_tokens // 2, self._worker.model.break_even_context)

    def _victim_for(self, row: int) -> int | None:
        """Return the row to preempt so that `row` gets a block, or None.

        Candidates are `row` itself and all lower-ranked rows; the lowest-ranked one is chosen. A row can be preempted
        again only after it has generated a token since its last preemption. Without a candidate, `row` waits. That
        happens only while steps are in flight, because every admitted row has the blocks for its next token.
        """
        rows = self._rows
        behind = (rows.rank > rows.rank[row]) | ((rows.rank == rows.rank[row]) & (rows.sequence >= rows.sequence[row]))
        has_progress = rows.committed - rows.num_prompt > rows.preempted_at
        candidates = where((rows.state != FREE) & behind & has_progress)
        if not len(candidates):
            return None
        return int(candidates[np.lexsort((rows.sequence[candidates], rows.rank[candidates]))[-1]])
