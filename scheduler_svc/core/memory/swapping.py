"""Host memory of one worker, for the KV of preempted requests and for cached blocks that leave the device.

* *Preempted requests.* The scheduler decides for each victim. It swaps if the host has room and copying the blocks out
  and back is expected to be faster than recomputing the tokens (`cost_model`).
* *Cached blocks.* The least recently used cached blocks move here before their device memory is needed. When a request
  continues with them, they are copied back to new device blocks. The copy here remains, as the first to be evicted
  (a *twin*): as long as it exists, the device block can be evicted without another copy.

Cached blocks use only the memory that preempted requests do not need, and the least recently used ones are evicted.
If the worker has a disk, they are also written to disk (`disk_space`). Like device blocks, host blocks are reused only
after the results of all steps that use them have arrived. With recurrent state, the states of both move here too
(`host_states`). With windows, each preempted request needs blocks for its window, and cached window blocks move like
other cached blocks (`window_blocks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, where
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.disk_space import DiskSpace
from scheduler_svc.core.memory.host_keys import CachedBlock, HostKeys
from scheduler_svc.core.memory.host_pool import HostPool
from scheduler_svc.core.memory.host_states import HostStates, StateCopy
from scheduler_svc.core.memory.prefix_directory import PrefixDirectory
from scheduler_svc.core.memory.window_blocks import window_key
from shared.prefix_keys import KEY_BYTES

SHARE = 0.25
"""Copies of cached blocks to the host that delay steps take at most this share of their time, on average."""
STEP_SHARE = 0.5
"""The same for one step."""
_SAVED_STEPS = 32
"""Number of steps whose unused share later steps can use."""
_RESERVED_PLANS = 2
"""If copies overlap with steps, the blocks of this many plans are free in advance: a step waits for the copies of the
blocks that it takes.
"""
_RESERVE_PART = 8
"""At most one device block in this many is free in advance."""
_HOPE = 1 / 4000
"""Part by which the chance of return rises towards 1 per plan. After moving did not pay, it is thus tried again."""
_LEAST_MEMORY, _MEMORY_PART = 64, 4
"""The chance of return is learned from about so many blocks, and from this part of the host's blocks if it is more."""
_DECAY = 0.995
"""The number of device blocks to keep free falls by this factor per plan, if plans take fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedKV:
    """A request's KV in host memory."""

    epoch: int
    """Epoch of the worker with the KV, which is unusable in other epochs."""
    host_blocks: IndexArray
    """Those of the first KV group, then those of the window before the next token, by position."""
    num_tokens: int
    """Number of leading tokens that it holds."""
    state: int | None = None
    """Place of the recurrent state after these tokens, see `host_states`; None if the model has no such state."""


class SwapSpace:
    """The host blocks of one worker."""

    def __init__(
        self,
        num_host_blocks: int,
        *,
        num_disk_blocks: int = 0,
        caches: bool = False,
        directory: PrefixDirectory | None = None,
        epoch: int = 0,
        states: HostStates | None = None,
        state_blocks: int = 0,
    ) -> None:
        """Make a space of free blocks.

        Args:
            num_host_blocks: blocks of the worker's host memory.
            num_disk_blocks: blocks on its disk, which is used only for cached blocks.
            caches: whether cached blocks move here.
            directory: gets the keys of cached blocks that begin a sequence, under `epoch`.
            epoch: the worker's epoch.
            states: places for recurrent states; None if the model has no such state.
            state_blocks: number of blocks as which the copy of a recurrent state counts.
        """
        self.states = states
        self.state_blocks = state_blocks
        self.state_copies: list[StateCopy] = []
        """The states of checkpoints that the plan being made copies here."""
        self.caches = caches and num_host_blocks > 0
        self.pays = self.caches
        """Whether cached blocks move here at present, because copying is faster than computing."""
        self.overlaps = False
        """Whether copies overlap with steps."""
        self.keys = HostKeys(num_host_blocks, directory, epoch)
        self.pool = HostPool(num_host_blocks, self.keys)
        self.disk: DiskSpace | None = None
        """The worker's disk; None without one."""
        if self.caches and num_disk_blocks:
            self.disk = DiskSpace(num_disk_blocks, self.pool, directory, epoch)
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.return_chance = 1.0
        """Learned chance that a cached block that moves here is copied back before it is evicted."""
        self._gain = 1.0 / max(_LEAST_MEMORY, num_host_blocks // _MEMORY_PART)
        """Weight of one block in it."""
        self.credit_s = 0.0
        """Time that the next plan may use for copies of cached blocks to the host, s, if they delay steps.

        After the copy of a large state it may be negative.
        """
        self.step_s = 0.0
        """Time that one plan may use for them, s."""
        self.planned_s = 0.0
        """Expected time of the last planned step, s."""
        self.reserve = 0
        """Number of device blocks to keep free, about as many as recent plans took."""
        self._next_id = 1

    def has_room(self, num_blocks: int) -> bool:
        """Return whether `num_blocks` is above 0, and as many host blocks are free or cached."""
        return 0 < num_blocks <= self.pool.num_available

    def has_room_for_state(self, step: int) -> bool:
        """Return whether the plan of this step can save a row's recurrent state, or the row has none."""
        return self.states is None or self.states.has_room(step)

    def out(self, blocks: IndexArray) -> BlockCopy:
        """Take host blocks and return the copy of device blocks to them."""
        self.swapped_out_blocks += len(blocks)
        return self._copy(blocks, self.pool.take(len(blocks)))

    def back(self, host_blocks: IndexArray, blocks: IndexArray) -> BlockCopy:
        """Return the copy of host blocks back to as many device blocks."""
        self.swapped_in_blocks += len(host_blocks)
        return self._copy(host_blocks, blocks)

    # ---------------------------------------------------------------- cached blocks

    def match(self, keys: bytes, start: int) -> IndexArray:
        """Return the host blocks that continue a sequence after its first `start` blocks; `keys`: its joined keys."""
        return self.keys.match(keys, start) if self.keys else NO_INDICES

    def windows(self, keys: bytes, positions: IndexArray, tables: IndexArray) -> IndexArray:
        """Return the host blocks of window blocks, which are here.

        Args:
            keys: the joined keys of a sequence.
            positions: the position of each window block in the sequence.
            tables: the table of each window block.
        """
        found = []
        for position, table in zip(positions.tolist(), tables.tolist(), strict=True):
            host_block = self.keys.get(window_key(keys[KEY_BYTES * position : KEY_BYTES * (position + 1)], table))
            assert host_block is not None, "a window block is not in host memory"
            found.append(host_block)
        return np.array(found, np.intp)

    def store(self, cached: Sequence[CachedBlock], *, last_step: int, answered_step: int) -> BlockCopy:
        """Move cached device blocks here; the caller has checked `has_room`.

        Args:
            cached: the blocks, whose keys are not here.
            last_step: the step that copies the blocks.
            answered_step: the last step that was answered.
        """
        num_in_vain = self._num_in_vain
        copy = self.out(np.array([each.block for each in cached], np.intp))
        self._learn(num_in_vain)
        entries = [each.entry for each in cached]
        if self.disk is not None:
            self.disk.arrived(entries)
        self.keys.add(entries, copy.targets, [each.chain.previous for each in cached if each.chain is not None])
        self.pool.release(copy.targets, last_step=last_step, answered_step=answered_step)
        return copy

    def load(self, host_blocks: IndexArray, blocks: IndexArray, *, last_step: int, answered_step: int) -> BlockCopy:
        """Copy cached blocks back to device blocks in the step `last_step`; they remain here as twins."""
        num_returned = len(host_blocks) - int(np.count_nonzero(self.keys.returned[host_blocks]))
        self.return_chance = 1.0 - (1.0 - self.return_chance) * (1.0 - self._gain) ** num_returned
        self.keys.twins[host_blocks] = self.keys.returned[host_blocks] = True
        self.pool.read(host_blocks, last_step=last_step, answered_step=answered_step)
        return self.back(host_blocks, blocks[: len(host_blocks)])

    def store_state(self, cached: CachedBlock, step: int, block_s: float) -> bool:
        """Copy the state after a cached block here in the plan of this step, if there is time and a place.

        Args:
            cached: the block, which has a checkpoint.
            step: the step of the plan that is being made.
            block_s: time of the copy of a block, s.

        Returns:
            whether the state is here afterwards.
        """
        assert self.states is not None
        assert cached.chain is not None
        if self.states.use(cached.entry.key):
            return True
        if not self.overlaps and self.credit_s < len(self.state_copies) * self.state_blocks * block_s:
            return False
        place = self.states.store(cached.entry.key, cached.chain.num_blocks, step)
        if place is None:
            return False
        self.state_copies.append(StateCopy(cached.chain.checkpoint, place))
        return True

    def take_state_copies(self) -> tuple[IndexArray, IndexArray]:
        """Return the checkpoints and the places of the states that the plan being made copies here."""
        if not self.state_copies:
            return NO_INDICES, NO_INDICES
        checkpoints, places = np.array(self.state_copies, np.intp).T
        self.state_copies = []
        return checkpoints, places

    def write_to_disk(self, now: float) -> None:
        """Start to write cached blocks to disk."""
        if self.disk is not None:
            num_in_vain = self._num_in_vain
            self.disk.write(now)
            self._learn(num_in_vain)

    def read_from_disk(self, slots: IndexArray, host_blocks: IndexArray, until: float) -> int:
        """Start to read slots to host memory; return their number.

        Args:
            slots: slots in order of position.
            host_blocks: blocks before them, which count as just used.
            until: time until which requests wait for them, s.
        """
        if self.disk is None:
            return 0
        num_in_vain = self._num_in_vain
        self.pool.touch(host_blocks)
        num_read = self.disk.read(slots, until)
        self._learn(num_in_vain)
        return num_read

    @property
    def _num_in_vain(self) -> int:
        return self.keys.num_in_vain + (0 if self.disk is None else self.disk.keys.num_in_vain)

    def _learn(self, num_in_vain: int) -> None:
        """Lower the chance of return by the blocks evicted since `_num_in_vain` had this value."""
        self.return_chance *= (1.0 - self._gain) ** (self._num_in_vain - num_in_vain)

    def wants_room(self, device: BlockPool, num_needed: int) -> bool:
        """Return whether cached blocks of the device should move here in a plan that takes `num_needed` blocks.

        They can then become free before later plans need their memory.
        """
        if not self.pays or not device.num_cached:
            return False
        num_free = device.num_free - num_needed
        return num_free < 0 or num_free + device.num_retired < self.reserve

    def step_planned(self, expected_s: float, num_moved: int, block_s: float) -> None:
        """Update the time for copies to the host, and the chance of return, when a plan is complete.

        Args:
            expected_s: expected time of the step, s.
            num_moved: number of cached blocks that the step copies to the host.
            block_s: time of one copy, s.
        """
        num_moved += self.state_blocks * len(self.state_copies)
        credit_s = self.credit_s + SHARE * expected_s - num_moved * block_s
        self.credit_s = min(credit_s, max(_SAVED_STEPS * SHARE * expected_s, block_s))
        self.step_s = max(STEP_SHARE * expected_s, block_s)
        self.planned_s = expected_s
        self.return_chance += _HOPE * (1.0 - self.return_chance)

    def blocks_taken(self, num_taken: int, num_blocks: int) -> None:
        """Adapt the number of device blocks to keep free; a plan took `num_taken` of the device's `num_blocks`."""
        if self.overlaps:
            num_taken *= _RESERVED_PLANS
        reserve = max(num_taken, int(self.reserve * _DECAY), 1)
        self.reserve = min(reserve, max(1, num_blocks // _RESERVE_PART))

    def drop_cached(self) -> None:
        """Remove all cached blocks and states, because some of them may be wrong."""
        self.drop_states()
        if self.keys:
            self.pool.distrust(where(self.keys.holds))
        if self.disk is not None:
            self.disk.clear()

    def drop_states(self) -> None:
        """Remove all cached states, because some of them may be wrong."""
        if self.states is not None:
            self.states.drop_cached()

    def leave_directory(self) -> None:
        """Remove the keys from the directory, because the worker is lost."""
        self.keys.leave_directory()
        if self.disk is not None:
            self.disk.keys.leave_directory()

    def validate(self, swapped: list[SwappedKV]) -> None:
        """Check blocks and states against those of preempted requests and of disk jobs."""
        assert not self.state_copies, "states were to be copied, but no plan was made"
        tables = [each.host_blocks for each in swapped]
        if self.states is not None:
            self.states.validate(each.state for each in swapped if each.state is not None)
        if self.disk is not None:
            tables = tables + self.disk.held_tables()
            self.disk.validate()
        self.pool.validate(table.tolist() for table in tables)

    @property
    def num_held(self) -> int:
        """Number of host blocks of preempted requests and of copies in plans in flight."""
        return self.pool.num_held - (0 if self.disk is None else self.disk.num_host_blocks)

    def _copy(self, sources: IndexArray, targets: IndexArray) -> BlockCopy:
        copy = BlockCopy(copy_id=self._next_id, sources=sources.copy(), targets=targets.copy())
        self._next_id += 1
        return copy


def joined(copies: Sequence[BlockCopy]) -> tuple[IndexArray, IndexArray]:
    """Return all sources and all targets, as in the columns of a plan."""
    return (
        np.concatenate([NO_INDICES, *(copy.sources for copy in copies)]),
        np.concatenate([NO_INDICES, *(copy.targets for copy in copies)]),
    )
