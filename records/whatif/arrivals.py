"""Reads the load, step-time samples and the run's results from a record.

If a record has several cores, or gaps, only the part with the most requests is used.

A request's output length is known if the request was served completely. Otherwise, for example after a deadline, the
request is assumed to generate the mean number of tokens, and at least as many as it had generated.

Draft limits come from the plans; the numbers of verified and accepted drafts come from the step results.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from records.decoding import Opening, WorkerAtStart
from records.reader import Segment
from records.replay import to_config
from records.values import DiskJobSent, Entry, PlanAsked, PlanDigest
from records.whatif.acceptance import Acceptance, History, learn
from records.whatif.disk import DiskSample
from records.whatif.figures import NATURAL_ENDS, Figures, Timeline
from records.whatif.load import Arrival, Load, Member, most_members
from records.whatif.rows import Admitted, Rows, Work
from records.whatif.step_times import Sample
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason, Peer, RequestEnded
from scheduler_svc.recorder.tags import TAG_BYTES, fit
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import Pooling, RequestSpec

_ANY = 1 << 30
"""Assumed number of blocks for a row in use at the start of the record, which does not list the row's blocks."""
_NEVER_RUN = frozenset({EndReason.INVALID, EndReason.DUPLICATE})
"""End reasons of requests that would be refused under any settings; such requests are omitted."""


class WhatIfError(ValueError):
    """A record cannot be simulated."""


@dataclass(slots=True)
class Recorded:
    """A run as it was recorded."""

    load: Load
    figures: Figures
    samples: list[Sample]
    """Answered steps."""
    begin: float
    """Core time at the beginning of the load."""
    acceptance: Acceptance | None
    """Is None if no row could have drafts."""
    disk_samples: list[DiskSample] = field(default_factory=list)
    """Completed jobs of disks."""
    skipped_parts: int = 0
    """Number of unused parts of the record."""


class _Name(NamedTuple):
    frontend: Peer
    stream: int


@dataclass(slots=True)
class _Request:
    number: int
    event: ev.RequestArrived
    at: float
    left_out: bool = False
    num_delivered: int = 0
    """Number of generated tokens that the request already had when it arrived."""
    num_sampled: int = 0
    drafts: History = field(default_factory=History)
    end: RequestEnded | None = None
    ended_at: float = 0.0


@dataclass(slots=True)
class _Worker:
    member: Member
    rows: Rows
    in_flight: dict[int, tuple[float, Work]] = field(default_factory=dict)
    disk_jobs: dict[int, tuple[float, DiskJobSent, bool]] = field(default_factory=dict)
    """Disk jobs without a report, by ID, with the time of the order, and whether the job may have had to wait."""
    answered: float = 0.0
    """When the newest result of a step came; 0 before the first one."""

    def delays_disk(self, since: float) -> bool:
        """Return whether messages for or from its disk may have waited for a step since a time."""
        return self.member.hello.device.startswith("cpu") and (bool(self.in_flight) or self.answered > since)


def read_load(segments: Iterable[Segment], since_unix_s: float = -math.inf) -> Recorded:
    """Return the largest run in a record.

    Args:
        segments: the record, oldest first.
        since_unix_s: wall clock time, s; requests that arrived earlier are excluded from the results.

    Raises:
        WhatIfError: the record has no request, or no worker.
        ReplayError: the record was made with settings that this release does not know.
    """
    found: list[_Pass] = []
    for segment in segments:
        if not found or not found[-1].goes_on_with(segment.opening):
            found.append(_Pass(segment.opening, since_unix_s))
        found[-1].read(iter(segment))
    best = max(found, key=lambda each: each.num_requests, default=None)
    if best is None or not best.num_requests:
        raise WhatIfError("record: contains no requests; record the service while it is in use")
    if not best.has_workers:
        raise WhatIfError("record: contains no workers; record the service while it is in use")
    recorded = best.recorded()
    recorded.skipped_parts = len(found) - 1
    return recorded


class _Pass:
    """One pass over the contiguous segments of one core."""

    def __init__(self, opening: Opening, since_unix_s: float) -> None:
        self._config = to_config(opening.config)
        self._since = opening.core_time + since_unix_s - opening.unix_ns / 1e9
        self._incarnation, self._next_index = opening.incarnation, opening.first_index
        self._begin = self._now = opening.core_time
        self._timeline = Timeline()
        self._requests: list[_Request] = []
        self._live: dict[_Name, _Request] = {}
        self._workers: dict[Peer, _Worker] = {}
        self._members: list[Member] = []
        self._samples: list[Sample] = []
        self._disk_samples: list[DiskSample] = []
        self._core_keys: dict[bytes, float] = {}
        """Block keys that the core computed, each with the time at which it was first computed."""
        self._handlers: dict[type, Callable[..., None]] = {
            ev.RequestArrived: self._arrived,
            RequestEnded: self._ended,
            PlanAsked: self._planned,
            ev.StepDone: self._answered,
            ev.WorkerHello: self._hello,
            ev.WorkerLost: self._lost,
            DiskJobSent: self._disk_job_sent,
            ev.DiskReported: self._disk_reported,
        }
        for event, arrival in opening.live:
            self._add(event, arrival, left_out=True)
        for state in opening.workers:
            self._take_over(state)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def has_workers(self) -> bool:
        return bool(self._members or self._workers)

    def goes_on_with(self, opening: Opening) -> bool:
        """Return whether a segment follows without a gap."""
        return opening.incarnation == self._incarnation and opening.first_index == self._next_index

    def read(self, entries: Iterator[Entry]) -> None:
        """Read the entries of a segment."""
        for entry in entries:
            self._now, self._next_index = entry.time, entry.index + 1
            if entry.facts is not None:
                keys = entry.facts.keys
                for start in range(0, len(keys), TAG_BYTES):
                    self._core_keys.setdefault(fit(keys[start : start + TAG_BYTES], KEY_BYTES), entry.time)
            if (handler := self._handlers.get(type(entry.what))) is not None:
                handler(entry.what)

    # ---------------------------------------------------------------- requests

    def _arrived(self, event: ev.RequestArrived) -> None:
        self._add(event, self._now, left_out=False)

    def _add(self, event: ev.RequestArrived, at: float, *, left_out: bool) -> None:
        name = _Name(event.frontend, event.stream)
        if name in self._live:
            return  # The request was submitted twice; the core keeps the first.
        left_out |= at < self._since
        number = self._timeline.arrived(
            at,
            event.spec.num_prompt_tokens,
            left_out=left_out,
            first_by=event.ttft_deadline,
            last_by=event.total_deadline,
        )
        delivered = len(event.token_ids) - event.spec.num_prompt_tokens
        request = _Request(number, event, at, left_out, delivered, delivered)
        self._requests.append(request)
        self._live[name] = request

    def _ended(self, end: RequestEnded) -> None:
        request = self._live.pop(_Name(end.frontend, end.stream), None)
        if request is None:
            return
        request.end, request.ended_at = end, self._now
        self._timeline.ended(
            request.number,
            self._now,
            end.reason,
            outputs=end.completion_tokens,
            cached=end.cached_prompt_tokens,
            preemptions=end.preemptions,
        )

    # ---------------------------------------------------------------- workers

    def _hello(self, hello: ev.WorkerHello) -> None:
        self._join(hello, self._now)

    def _join(self, hello: ev.WorkerHello, at: float) -> _Worker:
        member = Member(hello=hello, joined=max(0.0, at - self._begin))
        worker = self._workers[hello.worker] = _Worker(member, Rows(hello))
        return worker

    def _take_over(self, state: WorkerAtStart) -> None:
        worker = self._join(state.hello, self._begin)
        for row in state.rows:
            request = self._live.get(_Name(row.frontend, row.stream))
            if request is None:
                continue
            tokens = len(request.event.token_ids)
            computed = max(0, tokens - row.prefill_left)
            samples = request.event.spec.pooling == Pooling.NONE
            worker.rows.admit([Admitted(row.row, row.generation, request.number, tokens, computed, samples, _ANY)])
            if row.held:
                worker.rows.hold([row.row], [])

    def _lost(self, lost: ev.WorkerLost) -> None:
        worker = self._workers.pop(lost.worker, None)
        if worker is not None:
            self._members.append(dataclasses.replace(worker.member, lost=self._now - self._begin))

    def _planned(self, asked: PlanAsked) -> None:
        plan, worker = asked.plan, self._workers.get(asked.worker)
        if plan is not None and worker is not None:
            worker.in_flight[plan.step] = (self._now, self._work(worker.rows, plan))

    def _work(self, rows: Rows, plan: PlanDigest) -> Work:
        rows.leave(plan.leaves)
        admitted = []
        for each in plan.admissions:
            request = self._live.get(_Name(each.frontend, each.stream))
            if request is not None:
                samples = request.event.spec.pooling == Pooling.NONE
                admitted.append(
                    Admitted(
                        each.row,
                        each.generation,
                        request.number,
                        each.num_tokens,
                        each.num_computed_tokens,
                        samples,
                        len(each.blocks),
                    )
                )
        rows.admit(admitted)
        rows.grow(plan.append_rows)
        rows.hold(plan.holds, plan.releases)
        rows.limit_drafts(plan.draft_rows, plan.draft_limits)
        copied = sum(len(copy.sources) for copy in (*plan.swap_outs, *plan.swap_ins))
        return rows.compute(plan.chunk_rows, plan.chunk_lengths, copied)

    def _answered(self, done: ev.StepDone) -> None:
        worker = self._workers.get(done.worker)
        planned = worker.in_flight.pop(done.step, None) if worker is not None else None
        if worker is None or planned is None:
            return
        at, work = planned
        now = self._now
        started = max(at, worker.answered)
        verified = accepted = np.zeros(len(work.rows), np.int64)
        if done.counts is not None and done.draft_counts is not None:
            # The step result omits failed rows.
            answered = np.isin(done.rows, work.rows)
            at_rows = np.searchsorted(work.rows, done.rows[answered])
            verified, accepted = verified.copy(), accepted.copy()
            verified[at_rows], accepted[at_rows] = done.draft_counts[answered], done.counts[answered] - 1
            worker.rows.accept(work, accepted)
        if work.num_rows:
            shape = work.shape._replace(drafts=int(verified.sum()))
            self._samples.append(
                Sample(shape, at, worker.answered, now, done.copy_s, min(done.copy_s, done.copy_delay_s))
            )
            self._timeline.step(work.num_rows, now - started, drafts=shape.drafts, accepted=int(accepted.sum()))
        worker.answered = now
        self._timeline.tokens(work.requests, now)
        of_rows = zip(
            work.requests.tolist(), work.most_drafts.tolist(), verified.tolist(), accepted.tolist(), strict=True
        )
        for number, most, num_verified, num_accepted in of_rows:
            request = self._requests[number]
            if most or num_verified:
                request.drafts.note(request.num_sampled, most, num_verified, num_accepted)
            request.num_sampled += 1 + num_accepted

    def _disk_job_sent(self, job: DiskJobSent) -> None:
        worker = self._workers.get(job.worker)
        if worker is not None:
            worker.disk_jobs[job.copy_id] = self._now, job, bool(worker.disk_jobs) or worker.delays_disk(self._now)

    def _disk_reported(self, report: ev.DiskReported) -> None:
        worker = self._workers.get(report.worker)
        sent = worker.disk_jobs.pop(report.copy_id, None) if worker is not None else None
        if worker is not None and sent is not None and not report.failed:
            at, job, waited = sent
            waited |= worker.delays_disk(at)
            self._disk_samples.append(DiskSample(job.reads, job.num_blocks, report.seconds, self._now - at, waited))

    # ---------------------------------------------------------------- the load

    def recorded(self) -> Recorded:
        """Return the run."""
        members = [*self._members, *(worker.member for worker in self._workers.values())]
        members.sort(key=lambda member: member.joined)
        # Ignore workers that leave after the last request arrives. A slower simulation still needs them.
        last = self._now if self._live else max(each.ended_at for each in self._requests)
        members = [
            member
            if member.lost is None or member.lost < last - self._begin
            else dataclasses.replace(member, lost=None)
            for member in members
        ]
        following = self._following_keys()
        natural = [
            each.end.completion_tokens for each in self._requests if each.end and each.end.reason in NATURAL_ENDS
        ]
        mean_outputs = max(1, round(sum(natural) / len(natural))) if natural else 1
        arrivals = [
            self._arrival(each, following.get(each.number, b""), mean_outputs)
            for each in self._requests
            if each.end is None or each.end.reason not in _NEVER_RUN
        ]
        arrivals.sort(key=lambda arrival: arrival.at)
        load = Load(config=self._config, arrivals=arrivals, members=members, duration=self._now - self._begin)
        figures = self._timeline.figures(most_members(members))
        acceptance = learn([each.drafts for each in self._requests])
        return Recorded(load, figures, self._samples, self._begin, acceptance, self._disk_samples)

    def _arrival(self, request: _Request, following: bytes, mean_outputs: int) -> Arrival:
        event, spec, end = request.event, request.event.spec, request.end
        reason = EndReason.STOP if end is None else end.reason
        outputs = request.num_sampled if end is None else end.completion_tokens
        cancelled_after = None
        if reason is EndReason.CANCELLED and not outputs:
            cancelled_after = request.ended_at - request.at
            outputs = mean_outputs
        elif reason not in NATURAL_ENDS and reason is not EndReason.CANCELLED:
            reason, outputs = EndReason.STOP, max(outputs, mean_outputs)
        outputs = min(max(outputs, request.num_delivered + 1), spec.max_tokens)
        if reason is EndReason.STOP and outputs == spec.max_tokens:
            reason = EndReason.LENGTH
        if spec.pooling:
            reason = EndReason.EMBEDDED
        since = request.at if not request.left_out else self._begin
        return Arrival(
            at=max(0.0, request.at - self._begin),
            spec=_plain(spec),
            num_tokens=len(event.token_ids),
            num_outputs=outputs,
            end=reason,
            cancelled_after=cancelled_after,
            keys=event.block_keys,
            following_keys=following,
            block_size=event.block_size,
            drafts=bytes(request.drafts.outcomes),
            deadline=None if event.deadline is None else event.deadline - since,
            ttft_deadline=None if event.ttft_deadline is None else event.ttft_deadline - since,
            total_deadline=None if event.total_deadline is None else event.total_deadline - since,
            accepted=event.accepted or request.left_out,
            left_out=request.left_out or end is None,
        )

    def _following_keys(self) -> dict[int, bytes]:
        """Return, by request, the keys of the blocks after its prompt that a later request's prompt also has.

        This happens if a conversation continues: the later prompt contains the earlier response. The core computed such
        a key while the earlier request was live, and the later prompt contains the key.
        """
        next_keys: dict[bytes, list[bytes]] = {}
        for request in self._requests:
            keys = request.event.block_keys
            for start in range(0, len(keys), KEY_BYTES):
                key = keys[start : start + KEY_BYTES]
                if self._core_keys.get(key, request.at) < request.at:
                    before = keys[start - KEY_BYTES : start] if start else request.event.spec.cache_scope
                    known = next_keys.setdefault(before, [])
                    if key not in known:
                        known.append(key)
        found: dict[int, bytes] = {}
        for request in self._requests if next_keys else ():
            last = request.event.block_keys[-KEY_BYTES:] or request.event.spec.cache_scope
            until = request.ended_at or self._now
            chain = b""
            while last in next_keys:
                fitting = (key for key in next_keys[last] if request.at <= self._core_keys[key] <= until)
                found_key = next(fitting, None)
                if found_key is None:
                    break
                next_keys[last].remove(found_key)
                chain += found_key
                last = found_key
            if chain:
                found[request.number] = chain
        return found


def _plain(spec: RequestSpec) -> RequestSpec:
    """Return a specification with only the fields that affect decisions in a simulation."""
    return spec._replace(
        stop_token_ids=b"", sampling=b"", grammar=b"", identity=b"", resume_info=b"", traceparent="", model=""
    )
