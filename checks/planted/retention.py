"""Planted bugs in the retention of cached blocks."""

from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug
from checks.sim.aims import adaptation, both, with_limits, with_traffic
from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.memory.retention import Retention

_RETAINED = adaptation("retained sessions")


@bug("retain.order", aim=_RETAINED)
def hint_ignored(patch: pytest.MonkeyPatch) -> None:
    """Retained blocks are evicted in the order of their last use."""
    patch.setattr(Retention, "levels", lambda self, blocks: np.zeros(len(blocks), np.intp))


@bug("core", aim=both(_RETAINED, with_limits(retention_share=0.05)))
def share_ignored(patch: pytest.MonkeyPatch) -> None:
    """A tenant may retain all blocks."""
    patch.setattr(Retention, "_make_room", lambda self, tenant, more, *_: (more, NO_INDICES))


@bug("retain.end", aim=_RETAINED)
def retention_never_ends(patch: pytest.MonkeyPatch) -> None:
    """The time to live of retained blocks has no effect."""
    patch.setattr(Retention, "ended", lambda self, now: NO_INDICES)


@bug("core", aim=_RETAINED)
def evicted_block_stays_retained(patch: pytest.MonkeyPatch) -> None:
    """A block that has left the cache counts as retained."""
    nothing: Any = None
    patch.setattr(Retention, "forget", lambda self, blocks: nothing)


@bug("retain.order", aim=both(_RETAINED, with_traffic(shared_salt=True)))
def waiting_retention_lost(patch: pytest.MonkeyPatch) -> None:
    """When the retention by one tenant ends, that by another tenant of the same block is lost."""

    def both_end(self: Retention, blocks: IndexArray) -> None:
        self._leave(0, blocks)
        self._leave(1, blocks)

    patch.setattr(Retention, "_end", both_end)
