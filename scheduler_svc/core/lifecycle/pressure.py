"""Pressure on the service at one time: each worker's load and what waiting requests lack.

Reading the pressure changes nothing. It visits every waiting request, so call it only while an operator watches.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import WaitReason
from scheduler_svc.core.lifecycle.states import WAITING
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPressure:
    """The load of one worker."""

    worker_id: str
    draining: bool = False
    rows: int = 0
    """Occupied rows."""
    max_rows: int = 0
    """Maximum number of rows that plans occupy."""
    blocks_held: int = 0
    blocks_total: int = 0
    prefilling: int = 0
    """Rows whose prompt is not yet computed."""
    starved: int = 0
    """Decode rows without credit for another token."""
    obstacle: WaitReason | None = None
    """Why the worker's last plan admitted none of the requests that still compete for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The load of all workers, and what the waiting requests lack."""

    workers: tuple[WorkerPressure, ...] = ()
    waiting: int = 0
    lacking: "Counter[WaitReason]"
    """Number of waiting requests by what they lack. Requests that compete for a worker count as TURN."""
    oldest_s: float = 0.0
    """Age of the oldest waiting request, s."""
    tenant: str = ""
    """The tenant with the most requests that wait for its limit."""


_COMPETING = frozenset(
    (WaitReason.ROWS, WaitReason.MEMORY, WaitReason.BUDGET, WaitReason.BATCH, WaitReason.ELSEWHERE, WaitReason.ANSWER)
)
"""Reasons that the planner notes only for the first competing request."""


def pressure(workers: Iterable[Worker], live: Iterable[Request], config: CoreConfig, now: float) -> Pressure:
    """Return the pressure on the service.

    Args:
        workers: the fleet.
        live: all live requests, in order of arrival.
        config: the core's configuration.
        now: the time, s.
    """
    lacking: Counter[WaitReason] = Counter()
    tenants: Counter[str] = Counter()
    oldest = now
    for request in live:
        if request.state not in WAITING:
            continue
        reason = request.wait.reason
        lacking[WaitReason.TURN if reason in _COMPETING else reason] += 1
        oldest = min(oldest, request.arrival)
        if reason in (WaitReason.TENANT_LIMIT, WaitReason.TENANT_RATE):
            tenants[request.spec.tenant] += 1
    return Pressure(
        workers=tuple(_worker_pressure(worker, config) for worker in workers),
        waiting=lacking.total(),
        lacking=lacking,
        oldest_s=now - oldest,
        tenant=max(tenants, key=tenants.__getitem__, default=""),
    )


def _worker_pressure(worker: Worker, config: CoreConfig) -> WorkerPressure:
    rows = worker.rows
    decoding = rows.decoding
    return WorkerPressure(
        worker_id=worker.worker_id,
        draining=worker.draining,
        rows=rows.num_running,
        max_rows=min(config.max_num_seqs, rows.max_rows),
        blocks_held=worker.pool.num_held,
        blocks_total=worker.pool.num_blocks,
        prefilling=len(worker.prefilling),
        starved=int((rows.length[decoding] >= rows.allowed[decoding]).sum()),
        obstacle=worker.obstacle,
    )
