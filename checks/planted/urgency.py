"""Bugs in preemption: headroom, victims, and the use of the memory that victims release."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, both, with_limits
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.planning import batch_selection
from scheduler_svc.core.planning.block_allocation import BlockAllocation
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.rows import RowTable

_URGENT = adaptation("urgent requests")


@bug("work.waiting", "finish", aim=both(_URGENT, with_limits(policy="fcfs")))
def headroom_without_bound(patch: pytest.MonkeyPatch) -> None:
    """The headroom may be more than running requests can still take."""
    patch.setattr(Capacity, "reserve", lambda self, rows, growth=0: self._num_blocks // 2 if rows.num_running else 0)


@bug("capacity.guaranteed", aim=with_limits(capacity="guaranteed_no_evict", policy_preemption="off"))
def guarantee_of_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """`guaranteed_no_evict` counts the current tokens of running requests instead of their longest sequences."""

    def present(admits: Any, self: Capacity, rows: RowTable, *, num_new: int, worst_blocks: int, **how: int) -> Any:
        return num_new <= how["num_available"]

    wrap(patch, Capacity, "admits", present)


@bug("preempt.rank", "preempt.progress", "preempt.last", aim=_URGENT)
def victims_of_any_rank(patch: pytest.MonkeyPatch) -> None:
    """An urgent request may preempt requests that rank before it."""

    def any_rank(victims: Any, worker: Any, *how: Any) -> Any:
        ranks, worker.rows.rank = worker.rows.rank, np.full_like(worker.rows.rank, 1e12)
        try:
            return victims(worker, *how)
        finally:
            worker.rows.rank = ranks

    wrap(patch, batch_selection, "victims_for_urgent", any_rank)
    patch.setattr("scheduler_svc.core.planning.planner.victims_for_urgent", batch_selection.victims_for_urgent)


@bug(
    "preempt.rows",
    aim=both(
        adaptation("fair and overload"),
        with_limits(policy_preemption="auto", capacity="max_utilization", max_num_seqs=16, max_num_batched_tokens=64),
    ),
)
def rows_of_any_tenant(patch: pytest.MonkeyPatch) -> None:
    """Under `fair`, a tenant loses a row to a tenant with almost as many rows."""
    patch.setattr(batch_selection, "ROWS_PER_ROW", 1)


@bug("preempt.rank", aim=both(_URGENT, with_limits(preempt_threshold=5.0)))
def threshold_ignored(patch: pytest.MonkeyPatch) -> None:
    """A request is preempted for a request that ranks ahead by less than the threshold."""

    def without(
        victims: Any, worker: Any, backlog: Any, placement: Any, tenants: Any, config: CoreConfig, now: Any
    ) -> Any:
        config = dataclasses.replace(config, preempt_threshold=0.0)
        return victims(worker, backlog, placement, tenants, config, now)

    wrap(patch, batch_selection, "victims_for_urgent", without)
    patch.setattr("scheduler_svc.core.planning.planner.victims_for_urgent", batch_selection.victims_for_urgent)


@bug("preempt.progress", aim=_URGENT)
def victims_without_progress(patch: pytest.MonkeyPatch) -> None:
    """A request is preempted again before it has generated a token."""

    def never(occupy: Any, self: RowTable, request: Any, **how: Any) -> Any:
        row = occupy(self, request, **how)
        self.preempted_at[row] = -1
        return row

    wrap(patch, RowTable, "occupy", never)


@bug("order.victim", aim=_URGENT)
def victims_overtake(patch: pytest.MonkeyPatch) -> None:
    """A victim may be admitted before the urgent request for which it was preempted."""

    def free(preempted: Any, self: RequestRegistry, request: Any, *how: Any) -> None:
        preempted(self, request, *how)
        request.wait.behind = None

    wrap(patch, RequestRegistry, "preempted", free)


@bug("preempt.last", "preempt.rank", aim=_URGENT)
def first_in_rank_goes(patch: pytest.MonkeyPatch) -> None:
    """When memory runs out, the highest-ranked instead of the lowest-ranked candidate row is preempted."""

    def first(victim: Any, self: BlockAllocation, row: int) -> int | None:
        ranks, self._rows.rank = self._rows.rank, self._rows.rank.copy()
        last: int | None = victim(self, row)
        behind = [
            other
            for other in self._rows.occupied()
            if (ranks[other], self._rows.sequence[other]) > (ranks[row], self._rows.sequence[row])
            and self._rows.committed[other] - self._rows.num_prompt[other] > self._rows.preempted_at[other]
        ]
        self._rows.rank = ranks
        return min(behind, key=lambda other: (ranks[other], self._rows.sequence[other]), default=last)

    wrap(patch, BlockAllocation, "_victim_for", first)


@bug("preempt.class", aim=both(_URGENT, adaptation("urgent requests of two classes")))
def victims_of_other_classes(patch: pytest.MonkeyPatch) -> None:
    """An urgent request preempts requests of other classes."""

    def any_class(
        victims: Any, worker: Any, backlog: Any, placement: Any, tenants: Any, config: CoreConfig, now: Any
    ) -> Any:
        merged = dataclasses.replace(config, classes=_NoClasses(config.classes))
        return victims(worker, backlog, placement, tenants, merged, now)

    wrap(patch, batch_selection, "victims_for_urgent", any_class)
    patch.setattr("scheduler_svc.core.planning.planner.victims_for_urgent", batch_selection.victims_for_urgent)


class _NoClasses(dict[Any, Any]):
    """Configured classes that are treated as absent."""

    def __bool__(self) -> bool:
        return False


@bug("preempt.progress", "preempt.needless", aim=_URGENT)
def shared_blocks_count_as_released(patch: pytest.MonkeyPatch) -> None:
    """All blocks of a victim count as released, even blocks that other requests share."""
    patch.setattr("scheduler_svc.core.memory.block_pool.BlockPool.count_sole", lambda self, blocks: len(blocks))
