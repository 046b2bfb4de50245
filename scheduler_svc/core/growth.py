"""Blocks for rows that decode on, and who gives way when none is free.

Blocks that are only waiting for an answer are waited for. When none are coming, the request that ranks last under the
policy is preempted: it gives up its blocks, keeps its tokens and its place in the queue, and goes on later.
"""

import numpy as np

from scheduler_svc.core.arrays import IndexArray, where
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import DECODE, FREE
from scheduler_svc.core.swapping import BlockCopy
from scheduler_svc.core.worker import Worker


class Growth:
    """The blocks that one plan appends, and whom it preempts."""

    def __init__(self, worker: Worker, forecast: Forecast) -> None:
        self._worker = worker
        self._rows = worker.rows
        self._pool = worker.pool
        self._forecast = forecast
        self.appended_rows: list[IndexArray] = []
        self.appended_blocks: list[IndexArray] = []
        """One for each of the rows."""
        self.swap_outs: list[BlockCopy] = []
        self.preempted: list[Request] = []
        self.out_of_memory = False
        """Somebody had to be asked to give way."""

    def append(self, rows: IndexArray) -> None:
        """Gives a block to each of the rows; as many are free."""
        blocks = self._pool.take(len(rows))
        self._rows.grow(rows, blocks)
        self.appended_rows.append(rows)
        self.appended_blocks.append(blocks)

    def append_by_rank(self, rows: IndexArray) -> None:
        """Gives a block to each of the rows, taking blocks from others; the less urgent may go without, or be paused.

        In order of rank, so that nobody who got a block here is a victim of somebody later.
        """
        rows = rows[np.lexsort((self._rows.sequence[rows], self._rows.rank[rows]))]
        for index, row in enumerate(rows.tolist()):
            if self._rows.state[row] == DECODE and self._make_room_for(row):
                self.append(rows[index : index + 1])

    def preempt(self, row: int) -> None:
        """Takes a row from its request, whose KV goes to the host if that is cheaper than computing it again."""
        worker, rows = self._worker, self._rows
        num_computed = rows.num_computed(row)
        num_blocks = -(-num_computed // rows.block_size)
        request = rows.requests[row]
        assert request is not None
        recompute_s = self._forecast.prefill_token_s() * num_computed
        if not request.starts_over and worker.swap.is_cheaper(num_blocks=num_blocks, recompute_s=recompute_s):
            request, copy = worker.swap_out(row)
            self.swap_outs.append(copy)
        else:
            request = worker.vacate(row)
        request.preempted_at = request.num_generated
        self.preempted.append(request)
        worker.counters.preemptions += 1

    def _make_room_for(self, row: int) -> bool:
        """Sees to a free block for `row`; False when it has to wait for answers or became the victim itself."""
        while not self._pool.num_available:
            if self._pool.num_retired:
                return False
            self.out_of_memory = True
            self._worker.capacity.preempted()
            victim = self._victim_for(row)
            if victim is None:
                return False
            self.preempt(victim)
            if victim == row:
                return False
        return True

    def _victim_for(self, row: int) -> int | None:
        """Who gives way so that `row` gets a block: the last in rank, of `row` itself and those behind it.

        Only a row that has got on since it was last paused may be paused again. When nobody may, `row` waits: that
        happens only while steps are in flight, since every admitted row has the blocks for its next token.
        """
        rows = self._rows
        behind = (rows.rank > rows.rank[row]) | ((rows.rank == rows.rank[row]) & (rows.sequence >= rows.sequence[row]))
        has_progress = rows.committed - rows.num_prompt > rows.preempted_at
        candidates = where((rows.state != FREE) & behind & has_progress)
        if not len(candidates):
            return None
        return int(candidates[np.lexsort((rows.sequence[candidates], rows.rank[candidates]))[-1]])
