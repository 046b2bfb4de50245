"""Scheduler service metrics: core statistics and worker timings, as Prometheus families.

Series with a worker label exist while the worker is connected, and their counters restart at 0 when it returns. Totals
over workers must therefore be sums of rates (`sum(rate(...))`), not rates of sums.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.lifecycle.statistics import SchedulerStats, SessionStats, WorkerStats
from scheduler_svc.journal.journal import Journal
from scheduler_svc.leader_lease import LeaderLease
from scheduler_svc.recorder.recorder import RecorderStats
from scheduler_svc.standby.leading import StandbyStats
from shared import metric_names as names
from shared.metrics import Distribution, Registry, make_family

_READINGS_KEPT_S = 5.0
"""Time after which readings of a device are too old to report, because its worker computes nothing."""
_PHASES_OF = attrgetter("prepare_ns", "forward_ns", "sample_ns", "idle_before_ns")


@dataclass(slots=True)
class _WorkerTimes:
    """Sums of one worker's step timings."""

    step: Distribution
    idle: Distribution
    link: Distribution
    iteration: Distribution
    """Tokens per step."""
    model: str
    """Name of the model in the labels of `iteration`."""
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0
    energy_uj: int = 0
    idle_energy_uj: int = 0
    device: plan_pb2.DeviceReadings | None = None
    """Newest readings of the device; None if it has none."""
    read: float = 0.0
    """Time of these readings."""
    sent: dict[int, float] = field(default_factory=dict)
    """Send times of the plans in flight, by step."""
    answered: float = 0.0
    """Arrival time of the newest result."""

    def phases(self) -> tuple[tuple[str, int], ...]:
        """Return the sum of each phase, in ns."""
        return (
            ("prepare", self.prepare_ns),
            ("forward", self.forward_ns),
            ("sample", self.sample_ns),
            ("idle", self.idle_ns),
        )


@dataclass(frozen=True, slots=True)
class Leadership:
    """What the metrics show about leader and standbys."""

    number: int
    lease: LeaderLease | None
    standbys: StandbyStats | None


class SchedulerMetrics:
    """Metrics from outside the core, and the export of all metrics as families."""

    def __init__(self, spans_dropped: Callable[[], int] = lambda: 0) -> None:
        self.malformed_frames = 0
        self.workers_joined = 0
        self.workers_lost = 0
        """Workers that were lost without signing off."""
        self.model = ""
        """Name of the served model; "" before a worker has joined."""
        registry = self._registry = Registry()
        self._step = registry.histogram(names.STEP)
        self._idle = registry.histogram(names.DEVICE_IDLE)
        self._link = registry.histogram(names.LINK)
        self._turn = registry.histogram(names.TURN).labels()
        self._turn_part = registry.histogram(names.TURN_PART)
        self._plan = registry.histogram(names.PLAN).labels()
        self._iteration = registry.histogram(names.VLLM_ITERATION_TOKENS)
        registry.computed(names.SPANS_DROPPED, spans_dropped, "scheduler")
        self._times: dict[str, _WorkerTimes] = {}
        """Timings by worker ID."""

    def observe_turn(self, seconds: float) -> None:
        """Count a turn of the loop with its duration."""
        self._turn.observe(seconds)

    def turn_part(self, part: str) -> Distribution:
        """Return the distribution of the time of a part of a turn."""
        return self._turn_part.labels(part)

    def plan_sent(self, worker_id: str, step: int, num_tokens: int, began: float, now: float) -> None:
        """Count a plan with this many tokens that was made and sent from `began` to `now`."""
        times = self._times.get(worker_id) or self._of(worker_id)
        self._plan.observe(now - began)
        if times.model != self.model:
            times.model, times.iteration = self.model, self._iteration.labels(self.model, worker_id)
        times.iteration.observe(num_tokens)
        times.sent[step] = now

    def observe_step(self, worker_id: str, step: int, timings: plan_pb2.StepTimings, now: float) -> None:
        """Add a worker's timings of one step, whose result arrived at `now`."""
        times = self._times.get(worker_id) or self._of(worker_id)
        prepare, forward, sample, idle = _PHASES_OF(timings)
        seconds = (prepare + forward + sample) / 1e9
        times.step.observe(seconds)
        times.idle.observe(idle / 1e9)
        times.prepare_ns += prepare
        times.forward_ns += forward
        times.sample_ns += sample
        times.idle_ns += idle
        if timings.energy_uj or timings.idle_energy_uj:
            times.energy_uj += timings.energy_uj
            times.idle_energy_uj += timings.idle_energy_uj
        if timings.HasField("device"):
            times.device, times.read = timings.device, now
        sent = times.sent.pop(step, None)
        if sent is not None:
            times.link.observe(max(now - max(sent, times.answered) - seconds, 0.0))
        times.answered = now

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that has left, because every new worker may have a new name."""
        if self._times.pop(worker_id, None) is not None:
            for each in (self._step, self._idle, self._link):
                each.forget("worker", worker_id)
            self._iteration.forget("engine", worker_id)

    def families(
        self,
        stats: SchedulerStats,
        journal: Journal | None = None,
        recorder: RecorderStats | None = None,
        leadership: Leadership | None = None,
    ) -> list[link_pb2.MetricFamily]:
        """Return the current values of all metrics."""
        parts = self.in_parts(stats, journal, recorder, leadership)
        return [family for family in parts if family is not None]

    def in_parts(
        self,
        stats: SchedulerStats,
        journal: Journal | None = None,
        recorder: RecorderStats | None = None,
        leadership: Leadership | None = None,
    ) -> Iterator[link_pb2.MetricFamily | None]:
        """Yield the current values of all metrics. None is yielded after each part of a long family.

        With many workers, all values take tens of milliseconds, so the loop computes them in several turns.
        """
        model = self.model
        ended = [((reason.value,), count) for reason, count in stats.ended.items()]
        phases = [
            ((worker_id, phase), total_ns / 1e9)
            for worker_id, times in self._times.items()
            for phase, total_ns in times.phases()
        ]
        yield make_family(names.VLLM_RUNNING, [((model,), stats.running)])
        yield make_family(names.VLLM_WAITING, [((model,), stats.waiting)])
        yield make_family(names.QUEUE, [((reason,), count) for reason, count in stats.waiting_by_reason.items()])
        yield from _session_families(stats.sessions)
        yield make_family(names.FRONTENDS, [((), stats.frontends)])
        yield make_family(names.WORKERS, [((), len(stats.workers))])
        yield make_family(names.WORKERS_JOINED, [((), self.workers_joined)])
        yield make_family(names.WORKERS_LOST, [((), self.workers_lost)])
        yield make_family(names.REQUESTS_ENDED, ended)
        yield make_family(names.FORECASTS, [((each.of,), each.count) for each in stats.forecasts])
        yield make_family(
            names.FORECASTS_HELD,
            [
                ((each.of, quantile), count)
                for each in stats.forecasts
                for quantile, count in (("0.5", each.within_median), ("0.9", each.within_p90))
            ],
        )
        yield make_family(names.MALFORMED_FRAMES, [((), self.malformed_frames)])
        yield make_family(names.WORKER_TIME, phases)
        yield make_family(
            names.STEP_COST,
            [((each.worker_id, part), s) for each in stats.workers for part, s in each.step_costs.items()],
        )
        yield from _device_families(self._times, time.monotonic())
        yield from _worker_families(stats.workers, model)
        yield from self._registry.in_parts()
        if stats.workers:
            total = sum(worker.blocks_total for worker in stats.workers)
            held = sum(worker.blocks_held for worker in stats.workers)
            yield make_family(names.VLLM_KV_USAGE, [((model,), held / total if total else 0.0)])
            yield make_family(names.VLLM_CACHE_CONFIG, [((model, str(stats.block_size), str(total)), 1)])
        if journal is not None:
            yield from _journal_families(journal)
        if recorder is not None:
            yield from _recorder_families(recorder)
        if leadership is not None:
            yield from _leadership_families(leadership)

    def _of(self, worker_id: str) -> _WorkerTimes:
        times = self._times.get(worker_id)
        if times is None:
            times = self._times[worker_id] = _WorkerTimes(
                step=self._step.labels(worker_id),
                idle=self._idle.labels(worker_id),
                link=self._link.labels(worker_id),
                iteration=self._iteration.labels(self.model, worker_id),
                model=self.model,
            )
        return times


def _device_families(workers: Mapping[str, _WorkerTimes], now: float) -> list[link_pb2.MetricFamily]:
    """Return energy and readings of the devices. A value that no worker can read has no family."""
    energy = [
        ((worker_id, phase), total_uj / 1e6)
        for worker_id, times in workers.items()
        if times.energy_uj or times.idle_energy_uj
        for phase, total_uj in (("step", times.energy_uj), ("idle", times.idle_energy_uj))
    ]
    read = {
        worker_id: times.device
        for worker_id, times in workers.items()
        if times.device is not None and now - times.read <= _READINGS_KEPT_S
    }

    def values(field_name: str, *labels: str) -> list[tuple[tuple[str, ...], float]]:
        return [
            ((worker_id, *labels), getattr(device, field_name))
            for worker_id, device in read.items()
            if device.HasField(field_name)  # type: ignore[arg-type]
        ]

    found = (
        (names.WORKER_ENERGY, energy),
        (names.DEVICE_UTILISATION, values("utilisation")),
        (names.DEVICE_MEMORY, values("memory_used", "used") + values("memory_total", "total")),
        (names.DEVICE_POWER, values("power")),
        (names.DEVICE_CLOCK, values("processor_clock", "processor") + values("memory_clock", "memory")),
    )
    return [make_family(metric, samples) for metric, samples in found if samples]


def _journal_families(journal: Journal) -> list[link_pb2.MetricFamily]:
    figures = (
        (names.JOURNAL_WRITES, journal.covers),
        (names.JOURNAL_FAILURES, journal.stats.failures),
        (names.JOURNAL_FORGOTTEN, journal.stats.forgotten),
    )
    return [make_family(metric, [((), value)]) for metric, value in figures]


def _leadership_families(leadership: Leadership) -> list[link_pb2.MetricFamily]:
    lease, standbys = leadership.lease, leadership.standbys
    if lease is None and standbys is None:
        return []
    ready = (standbys is not None and standbys.ready > 0) or (lease is not None and lease.has_standby)
    families = [make_family(names.STANDBY_READY, [((), ready)]), make_family(names.LEADER_PID, [((), os.getpid())])]
    if leadership.number:
        families.append(make_family(names.LEADER_NUMBER, [((), leadership.number)]))
    if standbys is not None:
        families += [
            make_family(names.STANDBY_LAG, [((), standbys.lag_bytes)]),
            make_family(names.STANDBY_DROPPED, [((), standbys.dropped)]),
            make_family(names.STANDBY_COPIES, [((), standbys.copies)]),
        ]
    return families


def _recorder_families(stats: RecorderStats) -> list[link_pb2.MetricFamily]:
    figures = (
        (names.RECORD_SIZE, stats.num_bytes),
        (names.RECORD_WRITES, stats.writes),
        (names.RECORD_ENTRIES, stats.entries),
        (names.RECORD_FAILURES, stats.failures),
        (names.RECORD_SNAPSHOTS, stats.snapshots),
        (names.RECORD_LONGEST_FORK, stats.longest_fork_s),
    )
    return [make_family(metric, [((), value)]) for metric, value in figures]


def _session_families(stats: SessionStats) -> Iterator[link_pb2.MetricFamily]:
    gate = stats.gate
    yield make_family(names.SESSIONS, [(("active",), stats.active), (("pausing",), stats.pausing)])
    yield make_family(names.SESSION_TURNS, [((), stats.later_turns)])
    yield make_family(names.SESSION_LOST_TOKENS, [((), stats.lost_tokens)])
    pauses = stats.pauses
    yield make_family(names.SESSION_PAUSES, [((), pauses.count)])
    times = [("expected", pauses.expected_s), ("actual", pauses.actual_s), ("error", pauses.error_s)]
    yield make_family(names.SESSION_PAUSE_TIME, [((of,), seconds) for of, seconds in times])
    yield make_family(names.SESSION_GATE_HELD, [((), gate.held)])
    passed = [(("room",), gate.passed - gate.timed_out), (("bound",), gate.timed_out)]
    yield make_family(names.SESSION_GATE_PASSED, passed)
    yield make_family(names.SESSION_GATE_WAIT, [((), gate.waited_s)])


def _worker_families(workers: list[WorkerStats], model: str) -> Iterator[link_pb2.MetricFamily]:
    """Yield one family per metric, with the values for all workers."""
    single: tuple[tuple[names.Metric, Callable[[WorkerStats], int]], ...] = (
        (names.BATCH_ROWS, lambda w: w.rows_running),
        (names.BATCH_ROW_LIMIT, lambda w: w.rows_total),
        (names.BATCH_TOKENS, lambda w: w.last_step_tokens),
        (names.PLANS_IN_FLIGHT, lambda w: w.plans_in_flight),
        (names.STEPS, lambda w: w.counters.steps),
        (names.SAMPLED_TOKENS, lambda w: w.counters.generated_tokens),
        (names.DISCARDED_TOKENS, lambda w: w.counters.discarded_tokens),
        (names.DRAFT_TOKENS, lambda w: w.counters.draft_tokens),
        (names.ACCEPTED_DRAFT_TOKENS, lambda w: w.counters.accepted_draft_tokens),
        (names.RETAINED_BLOCKS, lambda w: w.blocks_retained),
        (names.WINDOW_BLOCKS, lambda w: w.window_blocks),
        (names.HOST_BLOCKS, lambda w: w.host_blocks_total),
        (names.HOST_BLOCKS_HELD, lambda w: w.host_blocks_held),
        (names.HOST_BLOCKS_CACHED, lambda w: w.host_blocks_cached),
        (names.SWAPPED_OUT, lambda w: w.swapped_out_blocks),
        (names.SWAPPED_IN, lambda w: w.swapped_in_blocks),
        (names.UNUSABLE_TOKENS, lambda w: w.counters.unusable_tokens),
        (names.STATES_EVICTED, lambda w: w.checkpoints.evicted),
        (names.HOST_STATES_EVICTED, lambda w: w.host_states.evicted),
    )
    multiple: tuple[tuple[names.Metric, Callable[[WorkerStats], dict[str, int]]], ...] = (
        (
            names.KV_BLOCKS,
            lambda w: {
                "free": w.blocks_free,
                "cached": w.blocks_cached,
                "held": w.blocks_held,
                "total": w.blocks_total,
            },
        ),
        (
            names.SCHEDULED_TOKENS,
            lambda w: {
                "prefill": w.counters.scheduled_tokens - w.counters.decode_rows,
                "decode": w.counters.decode_rows,
            },
        ),
        (names.DISK_BLOCKS, lambda w: {"cached": w.disk.cached, "total": w.disk.total}),
        (names.DISK_COPIES, lambda w: {"write": w.disk.written, "read": w.disk.read}),
        (names.DISK_REFUSED, lambda w: dict(w.disk.refused)),
        (names.STATE_CHECKPOINTS, lambda w: {"used": w.checkpoints.used, "total": w.checkpoints.total}),
        (
            names.HOST_STATES,
            lambda w: {"cached": w.host_states.cached, "held": w.host_states.held, "total": w.host_states.total},
        ),
        (names.HOST_STATE_COPIES, lambda w: {"save": w.host_states.stored, "restore": w.host_states.loaded}),
        (names.STATE_COPIES, lambda w: {"save": w.checkpoints.saved, "restore": w.checkpoints.restored}),
        (names.SCHEDULED_ROWS, lambda w: {"prefill": w.counters.chunks, "decode": w.counters.decode_rows}),
        (
            names.PREFIX_HIT_TOKENS,
            lambda w: {
                "device": w.counters.cached_tokens,
                "host": w.counters.restored_tokens,
                "disk": w.counters.loaded_tokens,
            },
        ),
        (
            names.PREEMPTIONS,
            lambda w: {"recompute": w.counters.preemptions - w.counters.swapped, "swap": w.counters.swapped},
        ),
    )
    engine: tuple[tuple[names.Metric, Callable[[WorkerStats], int]], ...] = (
        (names.VLLM_PREFIX_QUERIES, lambda w: w.counters.prompt_tokens),
        (names.VLLM_PREFIX_HITS, lambda w: w.counters.cached_tokens),
        (names.VLLM_PREEMPTIONS, lambda w: w.counters.preemptions),
        (names.VLLM_DRAFTS, lambda w: w.counters.drafting_rows),
        (names.VLLM_DRAFT_TOKENS, lambda w: w.counters.draft_tokens),
        (names.VLLM_ACCEPTED_TOKENS, lambda w: w.counters.accepted_draft_tokens),
    )
    for metric, value in single:
        yield make_family(metric, [((w.worker_id,), value(w)) for w in workers])
    for metric, values in multiple:
        yield make_family(metric, [((w.worker_id, kind), each) for w in workers for kind, each in values(w).items()])
    for metric, value in engine:
        yield make_family(metric, [((model, w.worker_id), value(w)) for w in workers])
