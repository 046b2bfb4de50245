"""Metrics of the scheduler service: statistics of the core and timings of the workers, as Prometheus families.

Series with a worker label exist while the worker is connected, and their counters restart at 0 when it returns. Totals
over workers must therefore be sums of rates (`sum(rate(...))`), not rates of sums.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.lifecycle.statistics import SchedulerStats, WorkerStats
from scheduler_svc.journal.journal import Journal
from shared.metrics import collect_families

_TURN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclass(slots=True)
class _WorkerTimes:
    """Sums of one worker's step timings."""

    step_seconds: Histogram
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    idle_ns: int = 0

    def phases(self) -> tuple[tuple[str, int], ...]:
        """Return the sum of each phase, in ns."""
        return (
            ("prepare", self.prepare_ns),
            ("forward", self.forward_ns),
            ("sample", self.sample_ns),
            ("idle", self.idle_ns),
        )


class SchedulerMetrics:
    """Metrics that the core does not have, and the export of all metrics as families."""

    def __init__(self) -> None:
        self.malformed_frames = 0
        self._registry = CollectorRegistry()
        self._step_seconds = Histogram(
            "quire_step_seconds",
            "Time a worker spent on one step",
            ("worker",),
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._turn_seconds = Histogram(
            "quire_scheduler_turn_seconds",
            "Time of one turn of the scheduler's loop, without its sleep",
            buckets=_TURN_BUCKETS,
            registry=self._registry,
        )
        self._times: dict[str, _WorkerTimes] = {}
        """Timings by worker ID."""

    def observe_turn(self, seconds: float) -> None:
        """Count a turn of the loop with its duration."""
        self._turn_seconds.observe(seconds)

    def observe_step(self, worker_id: str, timings: plan_pb2.StepTimings) -> None:
        """Add a worker's timings of one step."""
        times = self._times.get(worker_id)
        if times is None:
            times = self._times[worker_id] = _WorkerTimes(self._step_seconds.labels(worker_id))
        prepare, forward, sample = timings.prepare_ns, timings.forward_ns, timings.sample_ns
        times.step_seconds.observe((prepare + forward + sample) / 1e9)
        times.prepare_ns += prepare
        times.forward_ns += forward
        times.sample_ns += sample
        times.idle_ns += timings.idle_before_ns

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that has left, because every new worker may have a new name."""
        if self._times.pop(worker_id, None) is not None:
            self._step_seconds.remove(worker_id)

    def families(self, stats: SchedulerStats, journal: Journal | None = None) -> list[link_pb2.MetricFamily]:
        """Return the current values of all metrics."""
        families = [
            _family("quire_requests_running", "gauge", "Requests that hold a row", [({}, stats.running)]),
            _family("quire_requests_waiting", "gauge", "Requests in the waiting queue", [({}, stats.waiting)]),
            _family("quire_frontends", "gauge", "Connected front ends", [({}, stats.frontends)]),
            _family("quire_workers", "gauge", "Usable workers", [({}, len(stats.workers))]),
            _family(
                "quire_requests_ended",
                "counter",
                "Requests that ended, by reason",
                [({"reason": reason.value}, count) for reason, count in stats.ended.items()],
            ),
            _family("quire_malformed_frames", "counter", "Frames dropped as malformed", [({}, self.malformed_frames)]),
            _family(
                "quire_worker_seconds",
                "counter",
                "Where the workers' time went",
                [
                    ({"worker": worker_id, "phase": phase}, total_ns / 1e9)
                    for worker_id, times in self._times.items()
                    for phase, total_ns in times.phases()
                ],
            ),
        ]
        if journal is not None:
            families += _journal_families(journal)
        return families + _worker_families(stats.workers) + collect_families(self._registry)


def _journal_families(journal: Journal) -> list[link_pb2.MetricFamily]:
    stats = journal.stats
    figures: tuple[tuple[str, str, str, float], ...] = (
        ("quire_journal_bytes", "gauge", "Bytes of the journal's segments on disk", journal.num_bytes),
        ("quire_journal_requests", "gauge", "Requests in the journal", len(journal)),
        ("quire_journal_writes", "gauge", "1 while the journal can be written, else 0", journal.covers),
        ("quire_journal_commits", "counter", "Turns of the scheduler loop that the journal recorded", stats.commits),
        ("quire_journal_failures", "counter", "Writes to the journal that failed", stats.failures),
        ("quire_journal_forgotten", "counter", "Requests dropped from the journal because it is full", stats.forgotten),
    )
    return [_family(name, kind, help_text, [({}, value)]) for name, kind, help_text, value in figures]


def _worker_families(workers: list[WorkerStats]) -> list[link_pb2.MetricFamily]:
    blocks: list[tuple[dict[str, str], float]] = []
    for worker in workers:
        for state, count in (
            ("free", worker.blocks_free),
            ("cached", worker.blocks_cached),
            ("held", worker.blocks_held),
            ("total", worker.blocks_total),
        ):
            blocks.append(({"worker": worker.worker_id, "state": state}, count))
    families = [_family("quire_kv_blocks", "gauge", "KV blocks per worker and state", blocks)]
    per_worker: tuple[tuple[str, str, str, Callable[[WorkerStats], int]], ...] = (
        ("quire_batch_rows", "gauge", "Rows in use", lambda w: w.rows_running),
        ("quire_batch_tokens", "gauge", "Tokens of the newest step", lambda w: w.last_step_tokens),
        ("quire_plans_in_flight", "gauge", "Plans sent and not answered", lambda w: w.plans_in_flight),
        ("quire_steps", "counter", "Steps planned", lambda w: w.counters.steps),
        ("quire_scheduled_tokens", "counter", "Tokens planned", lambda w: w.counters.scheduled_tokens),
        ("quire_admitted_tokens", "counter", "Tokens of admitted sequences", lambda w: w.counters.prompt_tokens),
        (
            "quire_prefix_cache_hit_tokens",
            "counter",
            "Admitted tokens whose KV was in the prefix cache",
            lambda w: w.counters.cached_tokens,
        ),
        ("quire_sampled_tokens", "counter", "Tokens sampled and delivered", lambda w: w.counters.generated_tokens),
        (
            "quire_discarded_tokens",
            "counter",
            "Sampled tokens that were discarded",
            lambda w: w.counters.discarded_tokens,
        ),
        ("quire_host_blocks", "gauge", "Host KV blocks for swapping", lambda w: w.host_blocks_total),
        ("quire_host_blocks_held", "gauge", "Host KV blocks in use", lambda w: w.host_blocks_held),
        ("quire_swapped_out_blocks", "counter", "Blocks copied to the host", lambda w: w.swapped_out_blocks),
        ("quire_swapped_in_blocks", "counter", "Blocks copied back", lambda w: w.swapped_in_blocks),
        ("quire_preemptions", "counter", "Requests preempted, for memory or by rank", lambda w: w.counters.preemptions),
    )
    for name, kind, help_text, value in per_worker:
        samples = [({"worker": worker.worker_id}, float(value(worker))) for worker in workers]
        families.append(_family(name, kind, help_text, samples))
    return families


def _family(name: str, kind: str, help_text: str, samples: list[tuple[dict[str, str], float]]) -> link_pb2.MetricFamily:
    sample_name = name + "_total" if kind == "counter" else name
    return link_pb2.MetricFamily(
        name=name,
        help=help_text,
        type=kind,
        samples=[link_pb2.MetricSample(name=sample_name, labels=labels, value=value) for labels, value in samples],
    )
