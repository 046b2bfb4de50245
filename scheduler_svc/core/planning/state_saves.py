"""State saves: the recurrent states that a plan copies to checkpoints (see `state_checkpoints`).

If a save replaces the state of a cached prefix, the plan first copies that state to host memory, if it is worth it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.memory.host_keys import CachedBlock
from scheduler_svc.core.workers.chunks import chunk_cost
from scheduler_svc.core.workers.worker import Worker


class StateSave(NamedTuple):
    """The recurrent state of a row that is saved."""

    row: int
    num_tokens: int
    """Number of the row's tokens after which its state is saved."""
    checkpoint: int
    """Checkpoint, or place in host memory."""


class StateSaves(NamedTuple):
    """The saves of one plan, as its columns."""

    rows: IndexArray = NO_INDICES
    lengths: IndexArray = NO_INDICES
    checkpoints: IndexArray = NO_INDICES


NO_SAVES = StateSaves()


def save_states(
    worker: Worker, appended: IndexArray, prefilling: list[int], swapped: Sequence[StateSave] = ()
) -> StateSaves:
    """Choose the checkpoints of a plan. Call this once per plan, when its chunks are counted as computed.

    Call `kept_states` when the plan is complete.

    A generating row gets a block before its blocks are full. The worker saves its state at the end of the former blocks
    when the row begins a step there: this step, or a later one if drafts in flight may be rejected.

    Args:
        worker: the worker.
        appended: the decode rows that get a block in this plan.
        prefilling: the rows with a chunk in this plan.
        swapped: the states of rows that leave, which move to the host.
    """
    checkpoints, rows = worker.checkpoints, worker.rows
    if checkpoints is None or not (len(appended) or prefilling):
        return StateSaves(*np.array(swapped, np.intp).T) if swapped else NO_SAVES
    saves = list(swapped)
    num_left = Counter(appended.tolist())
    for row in appended.tolist():
        num_tokens = rows.capacity.item(row) - num_left[row] * rows.block_size
        num_left[row] -= 1
        slot = checkpoints.save_private(row, rows.generation.item(row), num_tokens, rows.committed.item(row))
        if slot is not None:
            saves.append(StateSave(row, num_tokens, slot))
    for row in prefilling:
        saves += (StateSave(row, *save) for save in worker.publisher.save_prompt(row, rows.num_computed(row)))
    _keep_replaced(worker, checkpoints.take_replaced())
    if not saves:
        return NO_SAVES
    return StateSaves(*np.array(saves, np.intp).T)


def kept_states(worker: Worker) -> tuple[IndexArray, IndexArray]:
    """Return the checkpoints that a complete plan copies to host memory, and their places there."""
    if worker.checkpoints is not None:
        worker.checkpoints.plan_made()
    return worker.swap.take_state_copies()


def keep_state(worker: Worker, cached: CachedBlock) -> bool:
    """Copy the state after a cached block with a checkpoint to host memory, if it is worth it.

    Returns:
        whether host memory has the state when the plan has run.
    """
    space, size = worker.swap, worker.rows.block_size
    assert space.states is not None
    assert cached.chain is not None
    num_blocks = cached.chain.num_blocks
    cost = chunk_cost(num_blocks * size, 0, worker.model.break_even_context)
    if not worker.costs.moves_sequence(num_blocks + space.state_blocks, cost, space.return_chance):
        return space.states.use(cached.entry.key)
    return space.store_state(cached, worker.last_step + 1, worker.costs.block_copy_s)


def _keep_replaced(worker: Worker, replaced: list[tuple[int, int]]) -> None:
    """Keep the states of replaced checkpoints in host memory; `replaced` as from `StateCheckpoints.take_replaced`."""
    if not worker.swap.pays:
        return
    for slot, block in replaced:
        for cached in worker.pool.cache.entries(np.array([block], np.intp)):
            if cached.chain is not None and not cached.chain.is_superseded:
                keep_state(worker, cached._replace(chain=cached.chain._replace(checkpoint=slot)))
