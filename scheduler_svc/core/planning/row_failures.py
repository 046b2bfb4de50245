"""Failed rows: which requests end, which are recomputed, and which KV is invalid.

Most failures concern only one request, for example because its constraints permit no token or its grammar cannot be
followed. The request ends. Its KV is valid, and no other request is affected.

Non-finite logits come from non-finite KV, which other requests may share. `judge` examines all such failures in one
result together, in one pass over the rows and their blocks:

* A block is *sound* if a row with the block got a token in the same step, because that token was computed from it.
* A block that is not sound is *invalid* if a failed request has written it. It is also invalid if two failed requests
  have shared it and their failures have no other explanation. The first of them, perhaps in an earlier step, puts the
  block in *doubt*.
* Invalid blocks leave the prefix cache. Every request that shares an invalid block is recomputed, whether it has failed
  or not.
* A failed request that has shared blocks which are neither sound nor invalid is recomputed without sharing.
* A failed request that began with a checkpoint of recurrent state, or with window blocks of another request, is
  recomputed without sharing, because sound blocks do not prove them. The checkpoint is dropped, and so are all window
  blocks that a failed request has read or written, and those with the same tokens.
* Any other failed request has failed because of its own KV, and ends. The checkpoints that a failed request has saved
  are dropped, and with them all cached states in host memory.

Consequences: a faulty request ends at its second attempt at the latest, and the step's other requests continue to
decode. A bad block leaves the cache after at most two requests have shared it, even if its writer ended long ago. A
request loses shared KV at most `MAX_LOST_PREFIXES` times. After that, it shares no blocks, so no other request can
invalidate its KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, BoolArray, IndexArray, any_of, where
from scheduler_svc.core.interface.events import FailedRow, FailureKind
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.rows import FREE
from scheduler_svc.core.workers.worker import Worker

MAX_LOST_PREFIXES = 2
"""Number of times that a request may lose shared KV before it stops sharing."""

END_REASONS = {
    FailureKind.NOT_FINITE: EndReason.ROW_FAILED,
    FailureKind.NO_TOKEN_ALLOWED: EndReason.INVALID,
    FailureKind.GRAMMAR_TOO_COSTLY: EndReason.INVALID,
    FailureKind.INTERNAL: EndReason.ROW_FAILED,
}
"""End reason for each kind of failure."""


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request whose row failed."""

    request: Request
    failure: FailedRow
    blocks: IndexArray
    """Its block table, `[num_blocks]`."""
    num_shared: int
    """Number of leading blocks written by other requests."""
    window_blocks: IndexArray
    """The window blocks that it has read or written."""
    in_row: bool
    """Whether it still has the row."""


@dataclass(slots=True)
class Verdict:
    """The consequences of the failures in one result."""

    ends: list[FailedRequest]
    """Failed requests that end."""
    again: list[FailedRequest] = field(default_factory=list)
    """Failed requests that have read invalid blocks and are recomputed."""
    alone: list[FailedRequest] = field(default_factory=list)
    """Failed requests that have read blocks which are neither sound nor invalid.

    They are recomputed and share nothing.
    """
    sharers: list[int] = field(default_factory=list)
    """Rows that have not failed but share invalid blocks. Their requests are recomputed."""
    invalid: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Blocks to remove from the prefix cache, once all of these requests have left their rows."""
    in_doubt: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Blocks that a failed request has read, to be doubted from now on."""


def judge(worker: Worker, failed: Sequence[FailedRequest], healthy: IndexArray) -> Verdict:
    """Return the consequences of the failures in one result without applying them.

    Args:
        worker: the worker that sent the result.
        failed: the requests whose rows failed in it.
        healthy: the rows that got a token in it.
    """
    rows, cache = worker.rows, worker.pool.cache
    verdict = Verdict([each for each in failed if each.failure.kind is not FailureKind.NOT_FINITE])
    nonfinite = [each for each in failed if each.failure.kind is FailureKind.NOT_FINITE]
    if not nonfinite:
        return verdict
    is_sound = np.zeros(worker.pool.num_blocks, np.bool_)
    for row in healthy.tolist():
        is_sound[rows.blocks(row)] = True
    is_invalid = np.zeros(worker.pool.num_blocks, np.bool_)
    writes = np.concatenate([_without(each.blocks[each.num_shared :], is_sound) for each in nonfinite])
    is_invalid[writes] = True
    reads = [_without(each.blocks[: each.num_shared], is_sound) for each in nonfinite]
    unexplained = [blocks for blocks in reads if not any_of(is_invalid[blocks])]
    read, num_readers = np.unique(np.concatenate((NO_INDICES, *unexplained)), return_counts=True)
    read_twice = read[num_readers + cache.doubted[read] > 1]
    is_invalid[read_twice] = True
    verdict.invalid = np.concatenate((read_twice, writes))
    verdict.in_doubt = _without(read, is_invalid)
    for each, blocks in zip(nonfinite, reads, strict=True):
        if any_of(is_invalid[blocks]):
            verdict.again.append(each)
        elif len(blocks) or (worker.prefixes.has_boundaries and each.num_shared):
            verdict.alone.append(each)
        else:
            verdict.ends.append(each)
    may_share = (rows.state != FREE) & (rows.shared > 0)
    may_share[healthy] = False
    may_share[[each.failure.row for each in nonfinite if each.in_row]] = False
    verdict.sharers = [
        row for row in where(may_share).tolist() if any_of(is_invalid[rows.blocks(row)[: rows.shared.item(row)]])
    ]
    return verdict


def lost_prefix(request: Request, *, alone: bool) -> None:
    """Record that a request lost shared KV; with `alone`, it shares nothing from now on."""
    request.faults.lost_prefixes += 1
    if alone or request.faults.lost_prefixes >= MAX_LOST_PREFIXES:
        request.computes_whole_prompt = True


def distrust_states(checkpoints: StateCheckpoints, swap: SwapSpace, failed: Sequence[FailedRequest]) -> None:
    """Drop the checkpoints that rows with non-finite logits have saved, and those that they began with.

    All cached states in host memory are dropped, because these rows may have saved them too.
    """
    nonfinite = [each for each in failed if each.failure.kind is FailureKind.NOT_FINITE]
    for each in nonfinite:
        checkpoints.distrust(each.failure.row, each.failure.generation)
        checkpoints.forget(each.blocks[max(0, each.num_shared - 1) : each.num_shared])
    if nonfinite:
        swap.drop_states()


def distrust_windows(worker: Worker, failed: Sequence[FailedRequest]) -> None:
    """Drop the window blocks of the sequences whose rows had non-finite logits, and all cached blocks in host memory.

    A sequence's window blocks may have moved to host memory and back since the row has read or written them.
    """
    assert worker.windows is not None
    nonfinite = [each for each in failed if each.failure.kind is FailureKind.NOT_FINITE]
    if not nonfinite:
        return
    parts = [each.window_blocks for each in nonfinite]
    parts += [worker.windows.attached_to(worker.prefixes.cached_blocks(each.request)) for each in nonfinite]
    blocks = np.unique(np.concatenate(parts))
    worker.pool.distrust(blocks[worker.windows.is_attached(blocks)])
    worker.swap.drop_cached()


def _without(blocks: IndexArray, excluded: BoolArray) -> IndexArray:
    return blocks[~excluded[blocks]]
