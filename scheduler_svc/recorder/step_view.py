"""Composition of the steps for live views, made by the recorder's thread while somebody watches.

The recorder's encoder knows which request occupies each row, so a view can begin at any time. Nothing here runs in the
scheduler's loop, and nothing at all while nobody watches.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protos.quire.plan.v1 import plan_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.recorder.worker_clock import WorkerClock

_NS = 1e9
_LOAD_INTERVAL_S = 1.0
_MAX_TENANTS = 100
_STREAM_BITS = 31


class Row(Protocol):
    """What the encoder knows of a row."""

    frontend: Peer
    stream: int
    prefill_left: int
    """Tokens of its prompt that no plan holds yet."""
    held: bool


@dataclass(frozen=True, slots=True)
class About:
    """What is shown of a request."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int


Key = tuple[Peer, int]
"""A request's front end and stream."""


@dataclass(slots=True)
class _Worker:
    worker_id: str
    clock: WorkerClock = field(default_factory=WorkerClock)
    plans: dict[int, tuple[admin.WatchedStep, float]] = field(default_factory=dict)
    """Steps without an answer, with the times of their plans."""
    end: float = 0.0
    """End of the last step, core time."""
    decodes: tuple[list[int], list[int]] | None = None
    """Rows that decode and their requests; None: the rows have changed."""


class StepView:
    """Parts of live views, collected from the calls of the core."""

    def __init__(self, unix_offset_ns: int) -> None:
        """Begin; `unix_offset_ns` is the wall clock at time 0 of the core's clock."""
        self._offset_ns = unix_offset_ns
        self._part = admin.WatchStepsResponse()
        self._frontends: dict[Peer, int] = {}
        self._workers: dict[Peer, _Worker] = {}
        self._load_due = 0.0

    def planned(self, plan: Plan, worker_id: str, rows: Mapping[int, Row], now: float) -> None:
        """Take a plan; `rows` are the worker's rows after it."""
        worker = self._workers.get(plan.worker)
        if worker is None or worker.worker_id != worker_id:
            worker = self._workers[plan.worker] = _Worker(worker_id)
        step = admin.WatchedStep(worker_id=worker_id, step=plan.step)
        chunks, lengths = plan.chunk_rows.tolist(), plan.chunk_lengths.tolist()
        for row, length in zip(chunks, lengths, strict=True):
            if row in rows:
                step.prefill_rows.append(row)
                step.prefill_requests.append(self._number(rows[row]))
                step.prefill_tokens.append(length)
        if len(plan.leaves) or plan.admissions or len(plan.holds) or len(plan.releases) or worker.decodes is None:
            # Rows with a chunk decode from the next step on, if it was their last one.
            decoding = [row for row, each in rows.items() if each.prefill_left <= 0 and not each.held]
            left_out = set(chunks)
            decoding = [row for row in decoding if row not in left_out]
            worker.decodes = decoding, [self._number(rows[row]) for row in decoding]
        step.decode_rows.extend(worker.decodes[0])
        step.decode_requests.extend(worker.decodes[1])
        if chunks:
            worker.decodes = None
        worker.plans[plan.step] = step, now
        for admission in plan.admissions:
            spec = admission.spec
            about = About(spec.request_id, spec.tenant, spec.num_prompt_tokens, spec.max_tokens)
            self._name(rows[admission.row], about)

    def answered(self, done: ev.StepDone, timings: plan_pb2.StepTimings | None, now: float) -> None:
        """Take the answer to a plan: its step is complete."""
        worker = self._workers.get(done.worker)
        step, planned = worker.plans.pop(done.step, (None, 0.0)) if worker is not None else (None, 0.0)
        if worker is None or step is None:
            return
        start, end = planned, now
        if timings is not None:
            start, end = worker.clock.place(
                planned,
                now,
                received=timings.received_unix_ns / _NS,
                forward_began=timings.started_unix_ns / _NS,
                before_s=timings.prepare_ns / _NS + done.copy_s,
                busy_s=(timings.forward_ns + timings.sample_ns) / _NS,
            )
        start = max(start, worker.end)
        worker.end = end = max(start, end)
        step.start.FromNanoseconds(round(start * _NS) + self._offset_ns)
        step.duration.FromNanoseconds(round((end - start) * _NS))
        self._part.steps.append(step)

    def lost(self, peer: Peer) -> None:
        """Forget a worker."""
        self._workers.pop(peer, None)

    def is_load_due(self, now: float) -> bool:
        """Return whether `add_load` should be called."""
        return now >= self._load_due

    def add_load(self, now: float, rows: Iterable[Row], live: Mapping[Key, About]) -> None:
        """Add what is shown once per second.

        Args:
            now: time of the core's clock.
            rows: rows of all workers.
            live: live requests, also those that wait.
        """
        self._load_due = now + _LOAD_INTERVAL_S
        waiting = Counter(about.tenant for about in live.values())
        del self._part.requests[:]
        for row in rows:
            about = live.get((row.frontend, row.stream))
            if about is not None:
                self._name(row, about)
                waiting[about.tenant] -= 1
        load = self._part.load
        load.SetInParent()
        for tenant, count in waiting.most_common(_MAX_TENANTS):
            if count > 0:
                load.waiting_by_tenant.add(tenant=tenant, waiting_requests=count)

    def take(self) -> admin.WatchStepsResponse | None:
        """Return what was collected since the last call; None if there is nothing."""
        if not (self._part.steps or self._part.HasField("load")):
            return None
        part, self._part = self._part, admin.WatchStepsResponse()
        return part

    def _number(self, row: Row) -> int:
        """Return a number that stands for a request as long as this view exists."""
        frontend = self._frontends.setdefault(row.frontend, len(self._frontends))
        return frontend << _STREAM_BITS | row.stream

    def _name(self, row: Row, about: About) -> None:
        self._part.requests.add(
            number=self._number(row),
            request_id=about.request_id,
            tenant=about.tenant,
            prompt_tokens=about.num_prompt_tokens,
            max_tokens=about.max_tokens,
        )
