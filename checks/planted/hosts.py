"""Bugs with resources that steps in flight still use: host blocks, vacated rows, swapped KV."""

import dataclasses
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, both, with_faults, with_few_host_blocks
from checks.sim.faults import Fault
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.host_keys import HostKeys
from scheduler_svc.core.memory.swapping import SwappedKV, SwapSpace
from scheduler_svc.core.planning import results
from scheduler_svc.core.planning.host_copies import HostCopies
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import CachedPrefixes
from scheduler_svc.core.workers.worker import Worker

_SWAPS = adaptation("swaps")
_MOVES = adaptation("moves")
_CACHES = adaptation("host cache")


@bug("kv.reuse", aim=_SWAPS)
def host_blocks_free_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """Host blocks are free as soon as the plan that copies them back is made."""

    def at_once(release: Any, self: Worker, request: Request, *, last_step: int) -> None:
        release(self, request, last_step=self.answered_step)

    wrap(patch, Worker, "release_swapped", at_once)


@bug("kv.reuse", "kv.prefix", aim=_SWAPS)
def host_blocks_wait_for_no_answer(patch: pytest.MonkeyPatch) -> None:
    """Retired host blocks become free with the next result, even if it is from an earlier step."""
    wrap(patch, BlockPool, "step_answered", lambda answered, self, step: answered(self, step + 1))


@bug("core", "empty", aim=_SWAPS)
def host_blocks_of_cancelled_kept(patch: pytest.MonkeyPatch) -> None:
    """If a request ends while it waits, its host blocks stay in use."""

    def forget(_drop: Any, self: RequestRegistry, request: Request) -> None:
        request.swapped = None

    wrap(patch, RequestRegistry, "drop_swapped", forget)


@bug("plan.copy", "kv.prefix", "core", "stream.token", "kv.reuse", aim=_SWAPS)
def swapped_kv_outlives_its_worker(patch: pytest.MonkeyPatch) -> None:
    """The swapped KV of a request counts as present on any worker, even after its worker was lost."""
    patch.setattr(CachedPrefixes, "swapped_here", lambda self, request: request.swapped)


@bug("kv.prefix", "plan.admission", "plan.copy", "core", aim=_SWAPS)
def swapped_one_token_more(patch: pytest.MonkeyPatch) -> None:
    """One token more than was computed counts as swapped out."""

    def more(swap_out: Any, self: Worker, row: int, blocks: Any) -> Any:
        request, copy = swap_out(self, row, blocks)
        swapped: SwappedKV = request.swapped
        request.swapped = dataclasses.replace(swapped, num_tokens=swapped.num_tokens + 1)
        return request, copy

    wrap(patch, Worker, "swap_out", more)


@bug("plan.copy", "kv.prefix", "stream.token", aim=_SWAPS)
def swapped_back_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """Host blocks are copied back in reverse order."""
    wrap(patch, SwapSpace, "back", lambda back, self, host_blocks, blocks: back(self, host_blocks[::-1], blocks))


def _at_once(change: Any, *arguments: Any, last_step: int, answered_step: int) -> Any:
    return change(*arguments, last_step=answered_step, answered_step=answered_step)


@bug("kv.reuse", aim=both(_CACHES, with_few_host_blocks))
def stored_blocks_free_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """A host block with a cached block can be evicted and taken while the copy to it is in flight."""
    wrap(patch, SwapSpace, "store", _at_once)


@bug("kv.reuse", aim=both(_CACHES, with_few_host_blocks))
def loaded_blocks_free_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """A host block can be evicted and taken while the copy from it is in flight."""
    wrap(patch, SwapSpace, "load", _at_once)


@bug("kv.reuse", aim=_CACHES)
def moved_blocks_free_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """A device block can be taken while the copy from it to the host is in flight."""
    wrap(patch, BlockPool, "evict_after", _at_once)


@bug("kv.prefix", "core", "kv.reuse", aim=both(_CACHES, with_few_host_blocks))
def host_keys_outlive_their_blocks(patch: pytest.MonkeyPatch) -> None:
    """The key of an evicted host block still leads to the block."""

    def stale(forget: Any, self: HostKeys, blocks: Any) -> Any:
        known = dict(self._blocks)
        gone = forget(self, blocks)
        self._blocks = known
        return gone

    wrap(patch, HostKeys, "forget", stale)
    patch.setattr(HostKeys, "validate", lambda self: None)


@bug("kv.prefix", aim=_CACHES)
def restored_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """The cached blocks of a prefix are copied back in reverse order."""
    wrap(patch, SwapSpace, "load", lambda load, self, host, blocks, **steps: load(self, host[::-1], blocks, **steps))


@bug("kv.prefix", aim=_CACHES)
def copied_after_the_overwrite(patch: pytest.MonkeyPatch) -> None:
    """A cached block that a plan takes is copied to the host by the next plan."""

    def late(move_out: Any, self: HostCopies, expected_s: float) -> None:
        pool = self._worker.pool
        saved, pool.saved = pool.saved, getattr(pool, "late", [])
        pool.late = saved  # type: ignore[attr-defined]
        move_out(self, expected_s)

    wrap(patch, HostCopies, "move_out", late)


@bug("kv.prefix", "kv.reuse", "plan.block", aim=_CACHES)
def last_block_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    """The last block of a prefix counts as restored, but is not copied."""

    def longer(load: Any, self: SwapSpace, host: Any, blocks: Any, **steps: int) -> Any:
        return load(self, host[:-1] if len(host) > 1 else host, blocks, **steps)

    wrap(patch, SwapSpace, "load", longer)


@bug("core", "plan.admission", "stream.order", "stream.ends", "worker.sound", aim=_MOVES)
def departures_settled_one_step_early(patch: pytest.MonkeyPatch) -> None:
    """A request that has left its row is dropped one result too early."""
    wrap(patch, results, "_settle_departures", lambda settle, worker, step: settle(worker, step + 1))


@bug("core", "plan.admission", "stream.order", "order.policy", aim=_MOVES)
def settled_with_the_first_answer(patch: pytest.MonkeyPatch) -> None:
    """A request that left its row is readmitted after the next result, although a later step also samples it."""

    def all_settled(settle: Any, worker: Worker, step: int) -> None:
        settle(worker, step)
        for departure in worker.departed.values():
            departure.request.unsettled = False

    wrap(patch, results, "_settle_departures", all_settled)


@bug("work.waiting", "finish", aim=_MOVES)
def unsettled_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A request stays unsettled after the result of its last step."""

    def stays(settle: Any, worker: Worker, step: int) -> None:
        requests = [departure.request for departure in worker.departed.values()]
        settle(worker, step)
        for request in requests:
            request.unsettled = True

    wrap(patch, results, "_settle_departures", stays)


@bug("core", "worker.sound", "stream.order", aim=both(_MOVES, with_faults(Fault.DRAIN, Fault.CANCEL, per_request=0.3)))
def prompts_leave_without_trace(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves its row while steps are in flight is not retained for their results."""

    def untraced(vacate: Any, self: Worker, row: int, last_step: int) -> Any:
        request = vacate(self, row, last_step)
        if not request.num_generated:
            self.departed = {key: each for key, each in self.departed.items() if each.request is not request}
            request.unsettled = False
        return request

    wrap(patch, Worker, "_vacate", untraced)
