"""Bugs in checkpoints of recurrent states."""

from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import both, with_checkpoints, with_faults
from checks.sim.faults import Fault
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints


@bug("state.prefix", aim=with_checkpoints(40))
def checkpoint_outlives_its_block(patch: pytest.MonkeyPatch) -> None:
    """A block is evicted and written again, but its former checkpoint is still used."""
    patch.setattr(StateCheckpoints, "forget", lambda self, blocks: None)


@bug("state.prefix", aim=with_checkpoints(40))
def state_without_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A row shares blocks without a checkpoint, so its state begins empty."""
    patch.setattr(StateCheckpoints, "reach", lambda self, blocks: len(blocks))
    patch.setattr(StateCheckpoints, "restore", lambda self, block: None)


@bug("state.prefix", aim=with_checkpoints(40))
def state_of_an_earlier_turn(patch: pytest.MonkeyPatch) -> None:
    """When a row leaves, its oldest private checkpoint is published as its newest one."""

    def oldest(leave: Any, self: StateCheckpoints, row: int, num_known: int) -> int:
        own = self._private.get(row, [])
        if len(own) > 1:
            own[0], own[1] = own[0]._replace(slot=own[1].slot), own[1]._replace(slot=own[0].slot)
        found: int = leave(self, row, num_known)
        return found

    wrap(patch, StateCheckpoints, "leave", oldest)


@bug("plan.save", "core", aim=with_checkpoints(2))
def slot_saved_twice(patch: pytest.MonkeyPatch) -> None:
    """A plan drops a checkpoint that it has just planned to save, and uses the slot again."""
    wrap(patch, StateCheckpoints, "_evict", lambda evict, self: (self._planned.clear(), evict(self))[1])


@bug("state.spoilt", aim=both(with_checkpoints(40), with_faults(Fault.SPOILT_ROW)))
def spoilt_state_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The checkpoints of a failed row stay available."""
    patch.setattr("scheduler_svc.core.scheduler.distrust_states", lambda checkpoints, failed: None)
