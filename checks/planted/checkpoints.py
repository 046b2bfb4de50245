"""Bugs in checkpoints of recurrent states, and in the states in host memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    both,
    with_checkpoints,
    with_drafts,
    with_faults,
    with_host_states,
    with_limits,
    with_little_memory,
    with_states_in_host_cache,
    with_swaps,
)
from checks.sim.faults import Fault
from checks.sim.scenario import Scenario
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.memory.host_states import HostStates
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.planning import planner, steady
from scheduler_svc.core.workers.worker import Worker


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
    patch.setattr("scheduler_svc.core.scheduler.distrust_states", lambda checkpoints, swap, failed: None)


@bug("state.prefix", "core", aim=both(with_swaps, with_host_states(1)))
def place_free_in_the_plan_that_reads_it(patch: pytest.MonkeyPatch) -> None:
    """A plan saves a state to the place from which it also restores another row, after the save."""
    wrap(patch, HostStates, "has_room", lambda has_room, self, step: has_room(self, step + 1))
    wrap(patch, HostStates, "take", lambda take, self, step: take(self, step + 1))


@bug("state.prefix", aim=both(with_swaps, with_host_states(4)))
def swapped_state_is_not_saved(patch: pytest.MonkeyPatch) -> None:
    """Only the KV of a preempted request is copied to the host."""
    save_states = planner.save_states  # type: ignore[attr-defined]
    patch.setattr(planner, "save_states", lambda *arguments: save_states(*arguments[:3]))


@bug("state.prefix", "plan.save", "core", aim=both(with_swaps, with_host_states(4)))
def one_place_for_two_states(patch: pytest.MonkeyPatch) -> None:
    """A place with the state of a preempted request counts as free."""

    def keep(take: Any, self: HostStates, step: int) -> int:
        place: int = take(self, step)
        self._free.append(place)
        return place

    wrap(patch, HostStates, "take", keep)
    patch.setattr(HostStates, "validate", lambda self, held: None)


@bug("plan.save", aim=both(with_swaps, with_host_states(4)))
def swapped_state_of_an_earlier_token(patch: pytest.MonkeyPatch) -> None:
    """The state before the newest computed token counts as that of the swapped KV."""
    save_states = planner.save_states  # type: ignore[attr-defined]

    def earlier(worker: Any, appended: Any, prefilling: Any, swapped: Any) -> Any:
        swapped = [each._replace(num_tokens=each.num_tokens - 1) for each in swapped]
        return save_states(worker, appended, prefilling, swapped)

    patch.setattr(planner, "save_states", earlier)


@bug("core", aim=both(with_swaps, with_host_states(4)))
def place_of_a_cancelled_request_is_kept(patch: pytest.MonkeyPatch) -> None:
    """If a preempted request ends, its blocks in host memory are released, but not the place of its state."""

    def without(release: Any, self: Worker, request: Any, *, last_step: int) -> None:
        states, self.swap.states = self.swap.states, None if last_step == self.last_step else self.swap.states
        release(self, request, last_step=last_step)
        self.swap.states = states

    wrap(patch, Worker, "release_swapped", without)


@bug("state.prefix", "plan.save", aim=both(with_drafts, with_checkpoints(8), with_limits(prefix_cache="hash")))
def due_state_counts_as_that_of_the_next_block(patch: pytest.MonkeyPatch) -> None:
    """If a row gets two blocks in a plan, both saves are due at the end of the second one."""
    save_states = planner.save_states  # type: ignore[attr-defined]

    def later(worker: Any, appended: Any, prefilling: Any, swapped: Any) -> Any:
        saves = save_states(worker, appended, prefilling, swapped)
        decodes = np.isin(saves.rows, appended) & (saves.lengths % worker.rows.block_size == 0)
        return saves._replace(lengths=np.where(decodes, saves.lengths + worker.rows.block_size, saves.lengths))

    patch.setattr(planner, "save_states", later)


def _with_short_steps(scenario: Scenario) -> Scenario:
    """Let drafts and chunks fill the steps."""
    workers = tuple(dataclasses.replace(size, max_tokens_per_step=9) for size in scenario.workers)
    return dataclasses.replace(scenario, workers=workers)


@bug("plan.tokens", aim=both(with_drafts, with_checkpoints(8), _with_short_steps))
def repeated_tokens_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Tokens that are computed again after rejected drafts do not count in the step's budget."""
    patch.setattr(planner.Planner, "_num_repeated", lambda self, decodes: 0)


@bug("state.prefix", "plan.save", aim=both(with_swaps, with_drafts, with_little_memory, with_host_states(3)))
def swapped_state_of_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """A request is swapped while its drafts are in flight, or before its state is rolled back."""
    patch.setattr(Worker, "has_present_state", lambda self, row: True)


_HOST_CACHE = with_states_in_host_cache(12, 20)


@bug("state.prefix", "plan.keep", aim=_HOST_CACHE)
def state_copied_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    """A plan copies a checkpoint to the host that the same plan saves afterwards."""
    patch.setattr(StateCheckpoints, "present_slot", StateCheckpoints.slot_of)


@bug("state.prefix", aim=_HOST_CACHE)
def state_in_host_memory_was_not_copied(patch: pytest.MonkeyPatch) -> None:
    """The table has the states of cached prefixes, but no plan copies them."""

    def without_copies(worker: Worker) -> Any:
        kept_states(worker)
        return NO_INDICES, NO_INDICES

    kept_states = planner.kept_states  # type: ignore[attr-defined]
    for module in (planner, steady):
        patch.setattr(module, "kept_states", without_copies)


@bug("state.prefix", "plan.keep", aim=with_states_in_host_cache(12, 1))
def cached_state_is_replaced_while_it_is_read(patch: pytest.MonkeyPatch) -> None:
    """A plan writes a state to the place of a cached one, and a row of the same plan begins with that one."""
    patch.setattr(HostStates, "_can_evict", lambda self, step: bool(self._cached))


@bug("state.prefix", aim=with_states_in_host_cache(12, 3))
def replaced_state_is_still_found(patch: pytest.MonkeyPatch) -> None:
    """The place of a cached state in host memory has another state by now."""

    def take(take: Any, self: HostStates, step: int) -> int:
        cached = dict(self._cached)
        place: int = take(self, step)
        for key, each in cached.items():
            self._cached.setdefault(key, each)
        return place

    wrap(patch, HostStates, "take", take)
    patch.setattr(HostStates, "validate", lambda self, held: None)


@bug(
    "state.spoilt",
    aim=both(
        with_states_in_host_cache(2, 20),
        with_faults(Fault.SPOILT_ROW, per_step=0.1),
        with_limits(max_num_batched_tokens=8),
    ),
)
def spoilt_state_stays_in_host_memory(patch: pytest.MonkeyPatch) -> None:
    """The cached states in host memory stay available after the failure of a row that may have saved them."""
    patch.setattr(HostStates, "drop_cached", lambda self: None)


@bug("core", aim=both(_HOST_CACHE, with_faults(Fault.SPOILT_ROW, per_step=0.05)))
def places_of_dropped_states_are_lost(patch: pytest.MonkeyPatch) -> None:
    """After the failure of a row, the places of the dropped states are never used again."""
    patch.setattr(HostStates, "drop_cached", lambda self: self._cached.clear())
