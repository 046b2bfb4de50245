"""State checkpoints: copies of recurrent states at block boundaries, from which other rows continue.

The KV blocks of a prefix do not suffice for a model with recurrent state: a row also needs the state after the last
token of the prefix, and that state is overwritten by the next token. The worker therefore has slots for copies of
states. This table decides what each slot holds. A checkpoint is one of two kinds:

* *published*: the state after a cached block. A request that shares the blocks up to this one continues from it. The
  checkpoint is dropped with its block. If slots are short, the least recently used checkpoint is dropped.
* *private*: the state of a running row at one of its newest block boundaries. The tokens before it may not have
  arrived, so its key is not known. When the row leaves, its newest checkpoint with known tokens is published.

A state is saved where it is likely to be needed again:

* at the last full block of a prompt, for requests with the same prompt;
* at the last cached block that a request shares with others but cannot use, because it has no checkpoint (a *fork*);
* at each block boundary while a row generates, for the next turn of a conversation and for preempted requests.

A slot may be reused at once, because a worker executes plans in order. Within a plan, states are first copied to host
memory (`host_states`), then rows are restored, and then states are saved. So only one rule remains: a plan saves at
most once to each slot. If a row verifies drafts, a plan may name a save that is due in a later step. A save to the same
slot, or the row's leave, cancels it.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.memory.boundaries import Boundaries

_NONE = -1
_PRIVATE_PART = 2
"""At most one slot in this many is private, so that running rows do not use up the slots."""


class _Private(NamedTuple):
    """A private checkpoint."""

    num_tokens: int
    slot: int


class StateCheckpoints(Boundaries):
    """Table of the checkpoint slots [0, num_slots) of one worker in one epoch."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.num_saved = 0
        self.num_restored = 0
        self.num_evicted = 0
        """Published checkpoints that were dropped because their slot was needed."""
        self._slot_of = np.zeros(num_blocks, np.int32)
        """By block: the slot with the state after it, plus 1; 0 without one."""
        self._block_of = [_NONE] * num_slots
        self._writers = [(_NONE, 0)] * num_slots
        """By slot: row and generation that saved it."""
        self._free = list(reversed(range(num_slots)))
        self._published: OrderedDict[int, None] = OrderedDict()
        """Slots with published checkpoints, least recently used first."""
        self._private: dict[int, list[_Private]] = {}
        """By row: its private checkpoints, ascending."""
        self._num_private = 0
        self._planned: set[int] = set()
        """Slots that the plan being made saves to."""
        self._replaced: list[tuple[int, int]] = []
        """Published checkpoints that the plan being made replaces."""

    @property
    def num_used(self) -> int:
        """Number of slots with a checkpoint."""
        return self.num_slots - len(self._free)

    # ---------------------------------------------------------------- requests

    def slot_of(self, block: int) -> int:
        """Return the slot with the state after a block; -1 without one."""
        return self._slot_of.item(block) - 1

    def present_slot(self, block: int) -> int:
        """Return the slot that has the state after a block when the plan being made begins; -1 without one."""
        slot = self.slot_of(block)
        return _NONE if slot in self._planned else slot

    def reach(self, blocks: IndexArray) -> int:
        """Return how many leading blocks a request can share: those up to the last one with a checkpoint."""
        found = np.flatnonzero(self._slot_of[blocks])
        return int(found[-1]) + 1 if len(found) else 0

    def restore(self, block: int) -> int:
        """Return the slot with the state after a block, and mark it as used."""
        slot = self.slot_of(block)
        assert slot != _NONE, "a row is restored without a checkpoint"
        self._published.move_to_end(slot)
        self.num_restored += 1
        return slot

    # ---------------------------------------------------------------- plans

    def save(self, row: int, generation: int, block: int) -> int | None:
        """Return the slot for the state after a cached block; None if it is saved already or no slot is left."""
        known = self.slot_of(block)
        if known != _NONE:
            self._published.move_to_end(known)
            return None
        slot = self._take(row, generation)
        if slot is not None:
            self._publish(slot, block)
        return slot

    def save_private(self, row: int, generation: int, num_tokens: int, num_known: int) -> int | None:
        """Return the slot for the state of a generating row; None if no slot is left.

        Args:
            row: the row.
            generation: its generation.
            num_tokens: number of tokens of the state.
            num_known: number of the row's tokens that have arrived.
        """
        own = self._private.setdefault(row, [])
        while len(own) > 1 and own[1].num_tokens <= num_known:
            self._release(own.pop(0))
        if self._num_private >= self.num_slots // _PRIVATE_PART:
            if not own or own[0].slot in self._planned:
                return None
            self._release(own.pop(0))
        slot = self._take(row, generation)
        if slot is not None:
            own.append(_Private(num_tokens, slot))
            self._num_private += 1
        return slot

    def take_replaced(self) -> list[tuple[int, int]]:
        """Return the published checkpoints that the plan being made replaces, once: (slot, block).

        Until the plan runs, the slot has their state.
        """
        replaced, self._replaced = self._replaced, []
        return replaced

    def plan_made(self) -> None:
        """Record that the plan with the saves so far is complete."""
        self._planned.clear()
        self._replaced.clear()

    # ---------------------------------------------------------------- rows that leave

    def leave(self, row: int, num_known: int) -> int:
        """Release all private checkpoints of a row except the newest with known tokens.

        Returns:
            the number of tokens of this checkpoint, which `publish` or `discard` must take next; 0 without one.
        """
        self.left(row)
        own = self._private.get(row)
        if own is None:
            return 0
        kept = max((each for each in own if each.num_tokens <= num_known), default=None)
        for each in own:
            if each is not kept:
                self._release(each)
        if kept is None:
            del self._private[row]
            return 0
        self._private[row] = [kept]
        return kept.num_tokens

    def publish(self, row: int, block: int) -> None:
        """Publish the checkpoint that `leave` has retained, as the state after a cached block."""
        (kept,) = self._private.pop(row)
        self._num_private -= 1
        known = self.slot_of(block)
        if known != _NONE:
            self._published.move_to_end(known)
            self._free.append(kept.slot)
        else:
            self._publish(kept.slot, block)

    def discard(self, row: int) -> None:
        """Release the checkpoint that `leave` has retained."""
        (kept,) = self._private.pop(row)
        self._release(kept)

    # ---------------------------------------------------------------- invalid states

    def forget(self, blocks: IndexArray) -> None:
        """Drop the checkpoints of blocks that left the cache."""
        slots = self._slot_of[blocks]
        for slot in slots[slots > 0].tolist():
            self._drop(slot - 1)

    def distrust(self, row: int, generation: int) -> None:
        """Drop the published checkpoints that a failed row has saved."""
        for slot in [slot for slot in self._published if self._writers[slot] == (row, generation)]:
            self._drop(slot)

    # ---------------------------------------------------------------- slots

    def _take(self, row: int, generation: int) -> int | None:
        if not self._free and not self._evict():
            return None
        slot = self._free.pop()
        self._writers[slot] = row, generation
        self._planned.add(slot)
        self.num_saved += 1
        return slot

    def _evict(self) -> bool:
        """Drop the least recently used published checkpoint; return False if there is none to drop."""
        oldest = next(iter(self._published), None)
        # If this plan saves the oldest one, all others are as new.
        if oldest is None or oldest in self._planned:
            return False
        self._replaced.append((oldest, self._block_of[oldest]))
        self._drop(oldest)
        self.num_evicted += 1
        return True

    def _publish(self, slot: int, block: int) -> None:
        self._slot_of[block] = slot + 1
        self._block_of[slot] = block
        self._published[slot] = None

    def _drop(self, slot: int) -> None:
        self._slot_of[self._block_of[slot]] = 0
        self._block_of[slot] = _NONE
        del self._published[slot]
        self._free.append(slot)

    def _release(self, checkpoint: _Private) -> None:
        self._num_private -= 1
        self._free.append(checkpoint.slot)

    def validate(self) -> None:
        """Check that each slot is free, private or published, and that published ones match their blocks."""
        private = [each.slot for own in self._private.values() for each in own]
        assert len(private) == self._num_private
        assert sorted([*self._free, *private, *self._published]) == list(range(self.num_slots))
        for slot, block in enumerate(self._block_of):
            assert (block != _NONE) == (slot in self._published)
            assert block == _NONE or self._slot_of[block] == slot + 1
        assert np.count_nonzero(self._slot_of) == len(self._published)
        assert not self._planned, "a plan with saves was not completed"
        for own in self._private.values():
            assert [each.num_tokens for each in own] == sorted({each.num_tokens for each in own})
