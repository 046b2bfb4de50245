"""Snapshot of the queues and KV blocks for operators' views.

A snapshot of a large service is bounded. It shows every n-th block and the first requests in long queues.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.memory.block_pool import CACHED, RETIRED, BlockPool
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.sessions import Sessions, ShownSession
from scheduler_svc.core.requests.request import Request, RequestKey
from scheduler_svc.core.workers.cached_prefixes import TIERS
from scheduler_svc.core.workers.worker import Worker

MAX_WORKERS = 64
MAX_CELLS = 16384
"""Maximum number of blocks shown, over all workers."""
MAX_QUEUED = 64
"""Maximum number of waiting requests shown per reason."""
MAX_SESSIONS_SHOWN = 64
"""Maximum number of sessions shown."""

FREE_STATE, CACHED_STATE, RETIRED_STATE, HELD_STATE, SHARED_STATE = range(5)
"""Block states for display. The last two states refer to the first owner; each further owner adds 2 to both numbers."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks in order of their numbers, with equal neighbours run-length encoded."""

    total: int
    stride: int
    """Every how many blocks one block is shown."""
    lengths: IndexArray
    states: IndexArray

    def cells(self) -> IndexArray:
        """Return the state of each shown block."""
        cells: IndexArray = np.repeat(self.states, self.lengths)
        return cells


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The blocks of a worker."""

    worker_id: str
    block_size: int
    device: Blocks
    host: Blocks
    owners: list[RequestKey]
    """The requests that hold blocks. Requests with blocks on the device come first."""
    tokens: list[int]
    """Number of tokens whose KV each of them has."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A waiting request."""

    key: RequestKey
    request_id: str
    tenant: str
    request_class: str
    priority: int
    num_tokens: int
    since: float
    """Core time at which it began to wait, s."""
    waits_for: WaitReason


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that all wait for the same reason."""

    reason: str
    length: int
    first: list[Queued]


@dataclass(frozen=True, slots=True)
class Tables:
    """The queues, the blocks and the sessions at one time."""

    block_maps: list[BlockMap]
    queues: list[Queue]
    sessions: list[tuple[ShownSession, str]]
    """Sessions, each with the tier from which its next turn can continue: one of `TIERS`, or "" for none."""


def tables(
    workers: Iterable[Worker], backlog: Backlog, live: Iterable[Request], sessions: Sessions | None = None
) -> Tables:
    """Return a snapshot.

    Args:
        workers: the fleet.
        backlog: the waiting requests.
        live: all live requests.
        sessions: the sessions, if the core recognises them.
    """
    workers = list(workers)
    shown = list(workers)[:MAX_WORKERS]
    most = MAX_CELLS // max(1, len(shown))
    swapped: list[Request] = []
    if any(worker.swap.pool.num_held for worker in shown):
        swapped = [request for request in live if request.swapped is not None]
    bands = [] if sessions is None else [(each, _tier(each, workers)) for each in sessions.shown(MAX_SESSIONS_SHOWN)]
    return Tables([block_map(worker, swapped, most) for worker in shown], queues(backlog, _obstacle(shown)), bands)


def _tier(session: ShownSession, workers: Iterable[Worker]) -> str:
    """Return the highest tier of any worker from which the session's next turn can continue; empty without one."""
    if not session.end:
        return ""
    tiers = set()
    for worker in workers:
        place = session.place
        block = place[1] if place is not None and place[0] == worker.epoch else None
        tiers.add(worker.prefixes.tier(session.end, block))
    return next((tier for tier in TIERS if tier in tiers), "")


def block_map(worker: Worker, swapped: Iterable[Request], most: int) -> BlockMap:
    """Return the blocks of a worker.

    Args:
        worker: the worker.
        swapped: requests with KV in host memory, of this worker or another.
        most: maximum number of blocks to show, for the device and for the host each.
    """
    rows = worker.rows
    owners: list[RequestKey] = []
    tokens: list[int] = []
    tables: list[IndexArray] = []
    for row in rows.occupied():
        request = rows.requests[row]
        assert request is not None
        owners.append(request.key)
        tokens.append(rows.num_computed(row))
        tables.append(worker.held_blocks(row))
    device_tables = tables.copy()
    for request in swapped:
        kept = worker.prefixes.swapped_here(request)
        if kept is not None:
            owners.append(request.key)
            tokens.append(kept.num_tokens)
            tables.append(kept.host_blocks)
    count = len(device_tables)
    device = _blocks(worker.pool, device_tables, 0, len(owners), most)
    host = _blocks(worker.swap.pool, tables[count:], count, len(owners), most)
    return BlockMap(worker.worker_id, rows.block_size, device, host, owners, tokens)


def _obstacle(workers: Iterable[Worker]) -> WaitReason | None:
    """Return the most frequent obstacle to admission among the workers; None if there is none."""
    found = Counter(worker.obstacle for worker in workers if worker.obstacle is not None)
    return max(found, key=found.__getitem__, default=None)


def queues(backlog: Backlog, obstacle: WaitReason | None = None) -> list[Queue]:
    """Return the waiting requests by reason. `obstacle` is the reason for those that wait for their turn."""
    lengths = backlog.by_reason
    return [
        Queue(reason, lengths[reason], [_queued(request, obstacle) for request in first])
        for reason, first in backlog.first_by_reason(MAX_QUEUED).items()
        if lengths[reason]
    ]


def _queued(request: Request, obstacle: WaitReason | None) -> Queued:
    spec, reason = request.spec, request.wait.reason
    return Queued(
        key=request.key,
        request_id=spec.request_id,
        tenant=spec.tenant,
        request_class=spec.request_class,
        priority=spec.priority,
        num_tokens=len(request.tokens),
        since=request.wait.since,
        waits_for=obstacle if reason is WaitReason.TURN and obstacle is not None else reason,
    )


def _blocks(pool: BlockPool, tables: list[IndexArray], first_owner: int, num_owners: int, most: int) -> Blocks:
    """Return a pool's blocks held by these tables. The owner of the first table has the number `first_owner`."""
    total = pool.num_blocks
    stride = max(1, -(-total // most))
    if not total:
        return Blocks(0, 1, NO_INDICES, NO_INDICES)
    owners = np.full(total, num_owners, np.intp)
    if tables:
        # Iterate in reverse, so that a shared block shows its first owner.
        numbers = np.arange(first_owner, first_owner + len(tables))[::-1]
        owners[np.concatenate(tables[::-1])] = np.repeat(numbers, [len(table) for table in tables[::-1]])
    references, owners = pool.references(stride), owners[::stride]
    states = np.where(references > 1, SHARED_STATE, HELD_STATE) + 2 * owners
    for reference, state in ((0, FREE_STATE), (CACHED, CACHED_STATE), (RETIRED, RETIRED_STATE)):
        states[references == reference] = state
    begins = np.flatnonzero(np.concatenate([[True], states[1:] != states[:-1]]))
    return Blocks(total, stride, np.diff(np.append(begins, len(states))), states[begins])
