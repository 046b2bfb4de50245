"""Bugs in speculation, where rows advance by several tokens per step."""

from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import both, with_drafts, with_limits, with_swaps, with_traffic
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.planning import planner, results
from scheduler_svc.core.planning.planner import Planner
from scheduler_svc.core.workers.rows import RowTable


@bug("kv.capacity", aim=with_drafts)
def drafts_without_blocks(patch: pytest.MonkeyPatch) -> None:
    """Blocks are reserved as if no draft in flight were accepted."""
    patch.setattr(RowTable, "reach", lambda self, rows: self.length[rows])


@bug("stream.credit", aim=both(with_drafts, with_traffic(credit_tokens=16)))
def drafts_without_credit(patch: pytest.MonkeyPatch) -> None:
    """Credit is compared with a row's minimum instead of its maximum number of tokens."""

    def generous(schedule: Any, self: Planner, limits: Any) -> Any:
        rows, allowed = self._rows, self._rows.allowed
        rows.allowed = allowed + rows.drafts
        try:
            return schedule(self, limits)
        finally:
            rows.allowed = allowed

    wrap(patch, Planner, "_schedule_drafts", generous)


@bug("limit.tokens", "plan.tokens", aim=both(with_drafts, with_limits(max_num_batched_tokens=8)))
def drafts_beyond_the_budget(patch: pytest.MonkeyPatch) -> None:
    """Drafts exceed the remaining token budget of the step."""
    patch.setattr(planner, "fitting", lambda limits, spare: limits)


@bug("worker.sound", aim=with_drafts)
def limits_not_sent(patch: pytest.MonkeyPatch) -> None:
    """The worker does not learn that limits have become 0."""

    def kept(change: Any, self: Planner, decodes: Any, *limits: Any) -> Any:
        changed = change(self, decodes, *limits)
        lowered = len(changed[1]) and changed[1].max() == 0
        return (NO_INDICES, NO_INDICES) if lowered else changed

    wrap(patch, Planner, "_set_draft_limits", kept)


@bug("core", aim=with_drafts)
def drafts_never_settled(patch: pytest.MonkeyPatch) -> None:
    """Drafts of completed steps still count as in flight."""

    def counted_again(settle: Any, worker: Any, answered: Any, generations: Any, drafts: Any, *rest: Any) -> Any:
        drafts.limits = np.zeros_like(drafts.limits)
        return settle(worker, answered, generations, drafts, *rest)

    wrap(patch, results, "_settle_drafts", counted_again)


@bug("core", aim=with_drafts)
def limit_of_the_former_request(patch: pytest.MonkeyPatch) -> None:
    """A request that enters a row inherits the previous request's draft limit."""

    def kept(vacate: Any, self: RowTable, row: int) -> Any:
        limit = self.draft_limit[row]
        left = vacate(self, row)
        self.draft_limit[row] = limit
        return left

    wrap(patch, RowTable, "vacate", kept)


@bug("kv.prefix", "plan.admission", aim=both(with_drafts, with_swaps))
def rejected_drafts_are_computed(patch: pytest.MonkeyPatch) -> None:
    """KV of drafts in flight is swapped out as valid, even if the drafts are rejected."""

    def too_much(computed: Any, self: RowTable, row: int) -> int:
        known: int = computed(self, row)
        return known + int(self.drafts[row])

    wrap(patch, RowTable, "num_computed", too_much)


@bug("stream.after_end", aim=with_drafts)
def tokens_behind_a_stop_token(patch: pytest.MonkeyPatch) -> None:
    """If a row gets several tokens in a step, only the last is compared with the stop tokens."""

    def last_only(stopped: Any, self: RowTable, rows: Any, tokens: Any, *gathered: Any) -> Any:
        positions = stopped(self, rows, tokens, *gathered)
        ends = np.append(rows[1:] != rows[:-1], True)
        return positions[ends[positions]]

    wrap(patch, RowTable, "stopped", last_only)


@bug("stream.ends", "stream.after_end", aim=with_drafts)
def tokens_beyond_the_limit(patch: pytest.MonkeyPatch) -> None:
    """A row with drafts does not end at the request's limit."""

    def unlimited(settle: Any, worker: Any, *rest: Any) -> Any:
        limit = worker.rows.limit
        worker.rows.limit = limit + 100 * (worker.rows.limit > 0)
        try:
            return settle(worker, *rest)
        finally:
            worker.rows.limit = limit

    wrap(patch, results, "_settle_drafts", unlimited)


@bug("scores.wrong", aim=both(with_drafts, with_traffic(scored=0.9)))
def scores_of_one_token(patch: pytest.MonkeyPatch) -> None:
    """All tokens of a row in a step get the first token's log-probabilities."""

    def first(scores: Any, worker: Any, event: Any, before: Any) -> Any:
        bases = {id(known[0]): known[1] for known in before.values() if known is not None}
        found = scores(worker, event, before)
        return [(r, i if of_prompt else bases[id(r)], of_prompt, part) for r, i, of_prompt, part in found]

    wrap(patch, results, "_scores", first)
