"""The core's state in numbers, for metrics and operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.lifecycle.states import WAITING
from scheduler_svc.core.memory.disk_space import DiskSpace
from scheduler_svc.core.memory.host_states import HostStates
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.session_gate import GateCounters
from scheduler_svc.core.queueing.sessions import PauseCounters
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.worker import Worker, WorkerCounters


class CheckpointStats(NamedTuple):
    """Checkpoints of a worker's recurrent states; all 0 for a model without such states."""

    total: int = 0
    used: int = 0
    saved: int = 0
    restored: int = 0
    evicted: int = 0


class HostStateStats(NamedTuple):
    """Recurrent states in a worker's host memory; all 0 for a model without such states."""

    total: int = 0
    cached: int = 0
    held: int = 0
    stored: int = 0
    loaded: int = 0
    evicted: int = 0


class DiskStats(NamedTuple):
    """Cached blocks on a worker's disk; all 0 without one."""

    total: int = 0
    cached: int = 0
    written: int = 0
    read: int = 0
    refused: Mapping[str, int] = MappingProxyType({})
    """Files that the worker has refused, by reason."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker's state. Blocks are counted as in `quire_kv_blocks`."""

    worker_id: str
    device: str
    pid: int
    cache_kinds: tuple[str, ...]
    """Kinds of cache that the worker stores, as in `WorkerHello`."""
    block_bytes: int
    """Bytes of a block; 0 if not known."""
    state_bytes: int
    """Bytes of a row's recurrent state; 0 if the model has none."""
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_retained: int
    """Blocks that requests have asked to retain. They are cached or held."""
    blocks_held: int
    window_blocks: int
    """Number of held blocks for layers with a sliding window. A shared block counts once per request."""
    rows_running: int
    rows_total: int
    draining: bool
    host_blocks_total: int
    host_blocks_held: int
    host_blocks_cached: int
    disk: DiskStats
    swapped_out_blocks: int
    swapped_in_blocks: int
    plans_in_flight: int
    last_step_tokens: int
    step_costs: dict[str, float]
    """Learned step times of the worker by part, s."""
    counters: WorkerCounters
    checkpoints: CheckpointStats
    host_states: HostStateStats


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A live request's state."""

    request_id: str
    state: str
    """"waiting", "running" or "ending"."""
    worker_id: str
    """Worker that runs it; "" without one."""
    tenant: str
    request_class: str
    priority: int
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    preemptions: int
    arrival: float
    """Time of arrival on the core's clock, s."""


@dataclass(frozen=True, slots=True)
class ForecastStats:
    """Accuracy of one kind of forecast."""

    of: str
    """"wait", "first_token" or "end"."""
    count: int
    """Requests for which the event was forecast and has happened."""
    within_median: int
    """Requests for which it happened within the forecast median."""
    within_p90: int
    """Requests for which it happened within the forecast 90th percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """The sessions in numbers; all are 0 without the gate for sessions."""

    active: int = 0
    """Sessions with a request that waits or runs, except at the gate."""
    pausing: int = 0
    """Sessions whose next turn is expected."""
    later_turns: int = 0
    """Requests that continued a session."""
    lost_tokens: int = 0
    """Tokens that such requests repeated, but that were not cached when they were admitted."""
    pauses: PauseCounters = field(default_factory=PauseCounters)
    gate: GateCounters = field(default_factory=GateCounters)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The core's state for metrics."""

    block_size: int
    """Tokens of a KV block; 0 before a worker has joined."""
    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    """Waiting requests by the reason of their wait."""
    frontends: int
    ended: dict[EndReason, int]
    forecasts: list[ForecastStats]
    workers: list[WorkerStats]
    sessions: SessionStats


def request_stats(request: Request, running: tuple[Worker, int] | None) -> RequestStats:
    """Return a request's metrics; `running` is its worker and row, or None."""
    num_tokens = len(request.tokens)
    if running is not None:
        worker, row = running
        num_tokens = int(worker.rows.committed[row])
    return RequestStats(
        request_id=request.spec.request_id,
        state="waiting" if request.state in WAITING else request.state.name.lower(),
        worker_id=running[0].worker_id if running is not None else "",
        tenant=request.spec.tenant,
        request_class=request.spec.request_class,
        priority=request.spec.priority,
        prompt_tokens=request.spec.num_prompt_tokens,
        generated_tokens=num_tokens - request.spec.num_prompt_tokens,
        max_tokens=request.limit - request.spec.num_prompt_tokens,
        preemptions=request.preemptions,
        arrival=request.arrival,
    )


def forecast_stats(forecast: Forecast) -> list[ForecastStats]:
    """Return each forecast kind's accuracy."""
    kinds = (("wait", forecast.waits), ("first_token", forecast.first_tokens), ("end", forecast.ends))
    return [ForecastStats(of, each.count, each.within_median, each.within_p90) for of, each in kinds]


def worker_stats(worker: Worker) -> WorkerStats:
    """Return a worker's metrics."""
    return WorkerStats(
        worker_id=worker.worker_id,
        device=worker.device,
        pid=worker.pid,
        cache_kinds=worker.cache_kinds,
        block_bytes=worker.block_bytes,
        state_bytes=worker.model.state_bytes,
        blocks_total=worker.pool.num_blocks,
        blocks_free=worker.pool.num_free,
        blocks_cached=worker.pool.num_cached,
        blocks_retained=worker.pool.retention.num_blocks,
        blocks_held=worker.pool.num_held,
        window_blocks=0 if worker.windows is None else worker.windows.num_held,
        rows_running=worker.rows.num_running,
        rows_total=worker.rows.max_rows,
        draining=worker.draining,
        host_blocks_total=worker.swap.pool.num_blocks,
        host_blocks_held=worker.swap.num_held,
        host_blocks_cached=worker.swap.pool.num_cached,
        disk=_disk_stats(worker.swap.disk),
        swapped_out_blocks=worker.swap.swapped_out_blocks,
        swapped_in_blocks=worker.swap.swapped_in_blocks,
        plans_in_flight=len(worker.in_flight),
        last_step_tokens=worker.last_tokens,
        step_costs=worker.costs.parts(),
        counters=worker.counters,
        checkpoints=_checkpoint_stats(worker.checkpoints),
        host_states=_host_state_stats(worker.swap.states),
    )


def _disk_stats(disk: DiskSpace | None) -> DiskStats:
    if disk is None:
        return DiskStats()
    return DiskStats(
        total=disk.pool.num_blocks,
        cached=disk.pool.num_cached,
        written=disk.written_blocks,
        read=disk.read_blocks,
        refused=dict(disk.refused),
    )


def _host_state_stats(states: HostStates | None) -> HostStateStats:
    if states is None:
        return HostStateStats()
    return HostStateStats(
        total=states.num_places,
        cached=states.num_cached,
        held=states.num_held,
        stored=states.num_stored,
        loaded=states.num_loaded,
        evicted=states.num_evicted,
    )


def _checkpoint_stats(table: StateCheckpoints | None) -> CheckpointStats:
    if table is None:
        return CheckpointStats()
    return CheckpointStats(
        total=table.num_slots,
        used=table.num_used,
        saved=table.num_saved,
        restored=table.num_restored,
        evicted=table.num_evicted,
    )
