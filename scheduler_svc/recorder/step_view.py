"""Step view: builds the parts of live views in the recorder's thread while an operator watches.

The recorder's encoder knows the request in each row, so a view can begin at any time. This code never runs in the
scheduler's loop, and only while a view is open.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protos.quire.plan.v1 import plan_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason, Note, NoteKind, Peer, RequestArrived, RequestEnded
from scheduler_svc.recorder.served import Served
from scheduler_svc.recorder.worker_clock import WorkerClock

_NS = 1e9
_LOAD_INTERVAL_S = 1.0
_MAX_TENANTS = 100
_STREAM_BITS = 31
_MAX_INCIDENTS = 100
_MAX_DETAIL = 200
_FAILURES = {EndReason.ROW_FAILED, EndReason.NO_WORKER, EndReason.STALLED}


class Row(Protocol):
    """State of a row in the encoder."""

    frontend: Peer
    stream: int
    prefill_left: int
    """Prompt tokens that are not planned yet."""
    held: bool


@dataclass(frozen=True, slots=True)
class About:
    """Shown fields of a request."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    traceparent: str = ""


class RequestNumbers:
    """Numbers that identify requests in all live views of one scheduler. Thread-safe."""

    def __init__(self) -> None:
        self._frontends: dict[Peer, int] = {}
        self._unused = itertools.count()

    def of(self, frontend: Peer, stream: int) -> int:
        """Return the number of a stream's request."""
        known = self._frontends.get(frontend)
        if known is None:
            # `setdefault` is atomic, so both threads get the same number.
            known = self._frontends.setdefault(frontend, next(self._unused))
        return known << _STREAM_BITS | stream


Key = tuple[Peer, int]
"""A request's front end and stream."""


@dataclass(slots=True)
class _Worker:
    worker_id: str
    clock: WorkerClock = field(default_factory=WorkerClock)
    plans: dict[int, tuple[admin.WatchedStep, float]] = field(default_factory=dict)
    """Steps without a result, with the times of their plans."""
    end: float = 0.0
    """End of the last step, core time."""
    decodes: tuple[list[int], list[int]] | None = None
    """Decode rows and their requests; None if the rows have changed."""
    waiting: tuple[list[int], list[int]] = ([], [])
    """Held-out rows and their requests, valid together with `decodes`."""


class StepView:
    """Parts of live views, collected from the calls of the core."""

    def __init__(self, unix_offset_ns: int, numbers: RequestNumbers) -> None:
        """Begin.

        Args:
            unix_offset_ns: wall clock at time 0 of the core's clock, ns.
            numbers: the numbers of requests.
        """
        self._offset_ns = unix_offset_ns
        self._numbers = numbers
        self._part = admin.WatchStepsResponse()
        self._workers: dict[Peer, _Worker] = {}
        self._load_due = 0.0
        self._served = Served()

    def planned(self, plan: Plan, worker_id: str, rows: Mapping[int, Row], now: float) -> None:
        """Show a plan; `rows` are the worker's rows after the plan."""
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
            # Rows decode from the step after their last chunk.
            decoding = [row for row, each in rows.items() if each.prefill_left <= 0 and not each.held]
            left_out = set(chunks)
            decoding = [row for row in decoding if row not in left_out]
            worker.decodes = decoding, [self._number(rows[row]) for row in decoding]
            left_out.update(decoding)
            waiting = [row for row in rows if row not in left_out]
            worker.waiting = waiting, [self._number(rows[row]) for row in waiting]
        step.decode_rows.extend(worker.decodes[0])
        step.decode_requests.extend(worker.decodes[1])
        step.waiting_rows.extend(worker.waiting[0])
        step.waiting_requests.extend(worker.waiting[1])
        if chunks:
            worker.decodes = None
        worker.plans[plan.step] = step, now
        for admission in plan.admissions:
            spec = admission.spec
            if not admission.attempt:
                self._served.admitted(min(admission.num_computed_tokens, spec.num_prompt_tokens))
            about = About(spec.request_id, spec.tenant, spec.num_prompt_tokens, spec.max_tokens, spec.traceparent)
            self._name(rows[admission.row], about)

    def answered(self, done: ev.StepDone, timings: plan_pb2.StepTimings | None, now: float) -> None:
        """Show the result of a plan, which completes its step."""
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
                before_s=timings.prepare_ns / _NS + done.copy_delay_s,
                busy_s=(timings.forward_ns + timings.sample_ns) / _NS,
            )
        start = max(start, worker.end)
        self._served.step(
            num_prompt=sum(step.prefill_tokens),
            num_outputs=len(done.tokens),
            num_again=min(len(step.decode_rows), len(done.rows)),
            gap_s=max(start, end) - worker.end if worker.end else 0.0,
        )
        worker.end = end = max(start, end)
        step.start.FromNanoseconds(round(start * _NS) + self._offset_ns)
        step.duration.FromNanoseconds(round((end - start) * _NS))
        self._part.steps.append(step)

    def joined(self, peer: Peer, worker_id: str, now: float) -> None:
        """Show the hello of a worker."""
        self._workers.pop(peer, None)
        self._incident(admin.Incident.KIND_WORKER_JOINED, now, worker_id=worker_id)

    def lost(self, peer: Peer, worker_id: str, reason: str, now: float) -> None:
        """Drop a lost worker."""
        self._workers.pop(peer, None)
        self._incident(admin.Incident.KIND_WORKER_LOST, now, worker_id=worker_id, detail=reason)

    def arrived(self, event: RequestArrived, now: float) -> None:
        """Show the arrival of a request."""
        self._served.arrived((event.frontend, event.stream), now, event.ttft_deadline, event.total_deadline)

    def noted(self, note: Note, request_id: str) -> None:
        """Show a line of a request's history."""
        if note.kind is NoteKind.FIRST_TOKEN:
            self._served.first_token((note.frontend, note.stream), note.time)
        elif note.kind in (NoteKind.PREEMPTED, NoteKind.SWAPPED):
            self._incident(admin.Incident.KIND_PREEMPTED, note.time, request_id=request_id, detail=note.text)

    def ended(self, end: RequestEnded, now: float) -> None:
        """Show the end of a request."""
        self._served.ended((end.frontend, end.stream), end.reason, now)
        if end.reason is EndReason.POISON:
            self._incident(admin.Incident.KIND_POISON, now, request_id=end.request_id)
        elif end.reason in _FAILURES:
            kind = admin.Incident.KIND_FAILED
            self._incident(kind, now, request_id=end.request_id, detail=end.reason.value)

    def is_load_due(self, now: float) -> bool:
        """Return whether `add_load` should be called."""
        return now >= self._load_due

    def add_load(self, now: float, rows: Iterable[Row], live: Mapping[Key, About]) -> None:
        """Add the load, which is shown once per second.

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
        load.rates.CopyFrom(self._served.take(now))

    def take(self) -> admin.WatchStepsResponse | None:
        """Return the parts collected since the last call; None if there are none."""
        if not (self._part.steps or self._part.incidents or self._part.HasField("load")):
            return None
        part, self._part = self._part, admin.WatchStepsResponse()
        return part

    def _number(self, row: Row) -> int:
        return self._numbers.of(row.frontend, row.stream)

    def _incident(
        self,
        kind: "admin.Incident.Kind.ValueType",
        now: float,
        *,
        worker_id: str = "",
        request_id: str = "",
        detail: str = "",
    ) -> None:
        if len(self._part.incidents) < _MAX_INCIDENTS:
            incident = self._part.incidents.add(
                kind=kind, worker_id=worker_id, request_id=request_id, detail=detail[:_MAX_DETAIL]
            )
            incident.time.FromNanoseconds(round(now * _NS) + self._offset_ns)

    def _name(self, row: Row, about: About) -> None:
        self._part.requests.add(
            number=self._number(row),
            request_id=about.request_id,
            tenant=about.tenant,
            prompt_tokens=about.num_prompt_tokens,
            max_tokens=about.max_tokens,
            trace_id=about.traceparent[3:35],
        )
