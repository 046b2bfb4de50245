"""Reads the lives of requests from a record.

The entries of a record are read once, in order. Only steps planned while a selected request was live are retained, so
memory use depends on the selected requests and not on the record's size.

A request that a restarted scheduler has taken over has one life. All times are on the first scheduler's clock.

The record does not list the decoding requests of a step. They follow from the plans: once its prompt is computed, a
request decodes in every step in which its row is not held out, until it leaves the row.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from protos.quire.link.v1 import link_pb2
from records.decoding import Opening, WorkerAtStart
from records.explain.facts import Holding, Life, Obstacle, Passing, Report, Step, StreamKey, Usual
from records.reader import Segment
from records.rows import Row, Rows
from records.values import AdmissionDigest, Entry, FrontendReported, PlanAsked, Timings
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import (
    LOADED_TOKENS,
    NO_CHECKPOINT,
    NO_TAIL,
    RESTORED_TOKENS,
    Note,
    NoteKind,
    Peer,
    QueueNote,
    RequestEnded,
    WaitReason,
)
from scheduler_svc.recorder.worker_clock import WorkerClock
from shared.prefix_keys import KEY_BYTES

_MAX_WENT_FIRST = 256
_MAX_HOLDINGS = 4096
_OF_NO_STATE = (NoteKind.FAULT, NoteKind.FORECAST, NoteKind.SESSION)
"""Notes that do not say whether a request waits or runs."""
_SAME_S = 0.1
"""Maximum time between a worker's loss and the notes about it for its requests, s."""
STALL_S = 1.0
"""If two entries are further apart than this, the scheduler has stalled: an idle one makes two entries per second."""
_MAX_ALIKE = 4
"""Number of requests with the same first block (the newest ones) that are searched for a common prefix."""
_MAX_SAMPLES = 20_000
"""Maximum number of steps used to compute usual step times; beyond that, some are dropped."""


@dataclass(slots=True, kw_only=True)
class _Row(Row):
    key: StreamKey
    since: float
    num_tokens: int = 0


@dataclass(slots=True)
class _Worker:
    worker_id: str
    max_drafts: int = 0
    rows: Rows[_Row] = field(default_factory=Rows)
    plans: dict[int, tuple[float, frozenset[StreamKey], dict[StreamKey, int], int]] = field(default_factory=dict)
    """Plans without a result, by step: time, decoding requests, chunks, swapped blocks."""
    clock: WorkerClock = field(default_factory=WorkerClock)
    decoding: Sequence[_Row] | None = None
    """Rows that decoded in the previous plan; None if there was no plan."""
    decodes: frozenset[StreamKey] = frozenset()
    """Requests in the rows of `decoding`."""
    drafting: dict[int, dict[int, StreamKey]] = field(default_factory=dict)
    """For each step without a result, the requests by row; only for a worker that verifies drafts."""
    obstacle: WaitReason | None = None
    process: str = ""
    pid: int = 0


@dataclass(slots=True)
class _Request:
    arrived: ev.RequestArrived
    notes: list[Note]
    steps: list[Step] = field(default_factory=list)
    end: RequestEnded | None = None
    report: Report | None = None
    workers: set[str] = field(default_factory=set)
    num_cached: int = -1
    num_drafted: int = 0
    num_accepted: int = 0
    went_first: list[Passing] = field(default_factory=list)
    placements: list[tuple[float, str]] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    known_tokens: int = 0
    known_by: StreamKey | None = None
    met_drain: bool = False
    """Whether the request found no worker because all were drained."""
    cut_at: float | None = None
    """When its scheduler's record ended; None if it did not, or if another scheduler has taken over the request."""
    arrival: float = 0.0
    """When the request arrived at the newest scheduler."""
    taken_over_s: float = 0.0
    """From the first arrival to the arrival at the newest scheduler."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Summary of a request, for the list of the slowest ones."""

    key: StreamKey
    request_id: str
    seconds: float
    """From the call's arrival, if its front end has reported, to its end."""
    ended_at: float
    """Wall clock, s."""
    reason: str


@dataclass(slots=True)
class Findings:
    """Results of a pass over a recording."""

    lives: list[Life] = field(default_factory=list)
    """The wanted requests, in order of arrival."""
    ended: list[Ended] = field(default_factory=list)
    live: list[Ended] = field(default_factory=list)
    """Live requests, with their duration so far."""
    steps: list[Step] = field(default_factory=list)
    """The wanted steps."""
    names: dict[StreamKey, str] = field(default_factory=dict)
    first_time: float = 0.0
    """Core time at the beginning of the recording."""
    last_wall: float = 0.0
    """Wall clock of the last entry, s."""
    clock_error_s: float = 0.0
    """Upper bound, over all workers, for the error in converting a worker's clock, s."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of the periods whose entries are missing, wall clock, s."""
    first_wall: float = 0.0
    """Wall clock at the beginning of the recording, s."""
    needs_earlier: bool = False
    """Whether a selected request was accepted by a scheduler whose record is not part of this pass."""


Wanted = Callable[[StreamKey, str], bool]
"""Returns whether a request, given its key and its id, is wanted."""


def study(
    segments: Iterable[Segment],
    *,
    wanted: Wanted = lambda _key, _request_id: False,
    wanted_step: tuple[str, int] | None = None,
) -> Findings:
    """Read a record once; return the wanted lives and steps, and the extent of the record."""
    return _Pass(wanted, wanted_step).run((segment.opening, segment) for segment in segments)


class _Pass:
    """One pass over a record."""

    def __init__(self, wanted: Wanted, wanted_step: tuple[str, int] | None) -> None:
        self._wanted = wanted
        self._wanted_step = wanted_step
        self._found = Findings()
        self._workers: dict[Peer, _Worker] = {}
        self._live: dict[StreamKey, _Request] = {}
        """Requests that are live, or whose report has not come."""
        self._watched: dict[StreamKey, _Request] = {}
        """The wanted requests in `_live` that have not ended."""
        self._told: list[tuple[StreamKey, _Request]] = []
        """All wanted requests."""
        self._alike: dict[bytes, list[tuple[bytes, StreamKey]]] = {}
        self._samples: list[Step] = []
        self._num_steps = 0
        self._incarnation = self._next_index = -1
        self._now = self._to_wall = 0.0
        self._away = (0.0, 0.0)
        """Period without a scheduler: from the previous scheduler's last entry to this one's first entry."""
        self._offset = 0.0
        """Seconds to add to the current scheduler's clock to get the first scheduler's clock."""
        self._cut_off: dict[tuple[str, int], tuple[StreamKey, _Request]] = {}
        """Wanted requests that were live when their scheduler ended, by id and stream."""
        self._stalls: list[tuple[float, float]] = []
        """(begin, end) of the periods during which the scheduler was stalled."""
        self._silent: list[tuple[str, float, float]] = []
        """(worker, time of loss, time of return) for workers that were lost and returned as the same process."""
        self._lost_processes: dict[str, tuple[str, float]] = {}
        """For each lost worker process: the worker's name and the time of the loss."""
        self._config: dict[str, Any] = {}
        self._draining: set[str] = set()
        """Names of drained workers."""
        self._first_keys: dict[StreamKey, StreamKey] = {}
        """For each request that was taken over: its key at the first scheduler."""
        self._handlers: dict[type, Callable[..., None]] = {
            ev.RequestArrived: self._arrived,
            Note: self._noted,
            QueueNote: self._queue_noted,
            PlanAsked: self._planned,
            RequestEnded: self._ended,
            FrontendReported: self._reported,
            ev.WorkerHello: self._hello,
            ev.WorkerLost: self._lost,
            ev.DrainRequested: self._drained,
            ev.ResumeRequested: self._resumed,
        }

    def run(self, parts: Iterable[tuple[Opening, Iterable[Entry]]]) -> Findings:
        """Read all parts."""
        for opening, entries in parts:
            if opening.incarnation != self._incarnation or opening.first_index != self._next_index:
                self._open(opening)
            for entry in entries:
                before, self._now, self._next_index = self._now, entry.time + self._offset, entry.index + 1
                if self._now - before > STALL_S:
                    self._stalls.append((before, self._now))
                if isinstance(entry.what, ev.StepDone):
                    self._answered(entry.what, entry.timings)
                elif (handler := self._handlers.get(type(entry.what))) is not None:
                    handler(entry.what)
        found = self._found
        found.last_wall = self._now + self._to_wall
        found.clock_error_s = max((worker.clock.error_s for worker in self._workers.values()), default=0.0)
        if found.clock_error_s == float("inf"):
            found.clock_error_s = 0.0
        for request in self._watched.values():
            if not _is_in_row(request.notes):
                self._add_holdings(request, self._workers.values())
        for key, request in self._live.items():
            if request.end is None:
                seconds = self._now - request.notes[0].time
                found.live.append(Ended(key, request.arrived.spec.request_id, seconds, found.last_wall, "live"))
        usual = Usual(self._samples)
        found.lives = [self._life(key, request, usual) for key, request in self._told]
        return found

    def _open(self, opening: Opening) -> None:
        """Begin with the state in the opening, because no earlier entries are known."""
        to_wall = opening.unix_ns / 1e9 - opening.core_time
        if self._incarnation < 0:
            self._to_wall = to_wall
        is_gap = opening.incarnation == self._incarnation
        unrecorded: dict[StreamKey, _Request] = {}
        for key, request in self._watched.items():
            request.cut_at = self._now
            if is_gap:
                unrecorded[key] = request
            else:
                self._cut_off[request.arrived.spec.request_id, key.stream] = key, request
        if is_gap:
            self._found.gaps.append((self._now + self._to_wall, opening.unix_ns / 1e9))
        else:
            self._offset = to_wall - self._to_wall
            self._away = (self._now, opening.core_time + self._offset) if self._incarnation >= 0 else (0.0, 0.0)
        self._incarnation, self._next_index = opening.incarnation, opening.first_index
        self._now = opening.core_time + self._offset
        self._found.first_time = self._found.first_time or self._now
        self._found.first_wall = self._found.first_wall or opening.unix_ns / 1e9
        self._config = json.loads(opening.config) if opening.config else {}
        self._workers.clear()
        self._live.clear()
        self._watched.clear()
        in_rows = {self._key(row.frontend, row.stream) for each in opening.workers for row in each.rows}
        for event, arrival in opening.live:
            key = self._key(event.frontend, event.stream)
            if key in unrecorded:
                self._go_on(key, unrecorded[key], is_in_row=key in in_rows)
            else:
                self._begin(event, arrival + self._offset)
        for state in opening.workers:
            self._take_over(state)

    def _go_on(self, key: StreamKey, request: _Request, *, is_in_row: bool) -> None:
        """Continue the life of a request after a gap in the record."""
        assert request.cut_at is not None
        seconds = self._now - request.cut_at
        text = f"entries of {seconds:.1f} s are missing in the record"
        request.notes.append(_note(key, request.cut_at, NoteKind.UNRECORDED, text))
        if not is_in_row:
            request.notes.append(_note(key, self._now, NoteKind.ARRIVED, "the record goes on"))
        request.cut_at = None
        self._live[key] = self._watched[key] = request

    def _take_over(self, state: WorkerAtStart) -> None:
        self._hello(state.hello)
        worker = self._workers[state.hello.worker]
        self._set_obstacle(worker, state.obstacle)
        for row in state.rows:
            key = self._key(row.frontend, row.stream)
            worker.rows.add(
                _Row(number=row.row, prefill_left=row.prefill_left, is_held=row.held, key=key, since=self._now)
            )
            request = self._live.get(key)
            if request is not None:
                request.workers.add(worker.worker_id)
                request.notes.append(_note(key, self._now, NoteKind.ADMITTED, f"in a row of {worker.worker_id}"))

    # ---------------------------------------------------------------- requests

    def _arrived(self, event: ev.RequestArrived) -> None:
        self._begin(event, self._now)

    def _begin(self, event: ev.RequestArrived, arrival: float) -> None:
        key = self._key(event.frontend, event.stream)
        known = self._live.get(key)
        if known is not None and known.end is None:
            return  # The request was submitted twice; the core keeps the first.
        request_id = event.spec.request_id
        if self._take_over_request(key, event, arrival):
            return
        self._found.names[key] = request_id
        request = self._live[key] = _Request(event, [_note(key, arrival, NoteKind.ARRIVED, "arrived")], arrival=arrival)
        same = self._alike.setdefault(event.block_keys[:KEY_BYTES], []) if event.block_keys else []
        if self._wanted(key, request_id):
            self._watched[key] = request
            self._told.append((key, request))
            self._found.needs_earlier |= event.accepted
            request.obstacles += [Obstacle(arrival, each.worker_id, each.obstacle) for each in self._workers.values()]
            # The last token is always computed, because its logits are needed.
            most = (event.spec.num_prompt_tokens - 1) // event.block_size if same else 0
            for keys, other in same:
                common = event.block_size * min(most, _common_blocks(keys, event.block_keys))
                if common > request.known_tokens:
                    request.known_tokens, request.known_by = common, other
        if event.block_keys:
            same.append((event.block_keys, key))
            del same[:-_MAX_ALIKE]

    def _take_over_request(self, key: StreamKey, event: ev.RequestArrived, arrival: float) -> bool:
        """Return whether an arrival continues a request from the previous scheduler; if so, continue its life."""
        first_key, request = self._cut_off.get((event.spec.request_id, key.stream), (key, None))
        if request is None or request.cut_at is None or request.report is not None:
            return False
        if request.end is not None and not event.accepted:
            return False
        del self._cut_off[event.spec.request_id, key.stream]
        kind, text = NoteKind.SCHEDULER_LOST, "its scheduler ended; the next one took it over"
        if request.end is not None:
            kind, text = NoteKind.SUBMITTED_AGAIN, "its front end lost the scheduler, and submitted it again"
            request.end = None
            request.notes.pop()
        request.notes.append(_note(first_key, request.cut_at, kind, text))
        if kind is NoteKind.SCHEDULER_LOST and not _is_in_row(request.notes[:-1]):
            request.notes.append(_note(first_key, arrival, NoteKind.ARRIVED, "arrived again"))
        request.cut_at, request.taken_over_s = None, max(0.0, arrival - request.notes[0].time)
        request.arrival = arrival
        self._first_keys[key] = first_key
        self._live[first_key] = self._watched[first_key] = request
        return True

    def _key(self, frontend: Peer, stream: int) -> StreamKey:
        key = StreamKey(frontend, stream)
        return self._first_keys.get(key, key)

    def _noted(self, note: Note) -> None:
        request = self._live.get(self._key(note.frontend, note.stream))
        if request is None or note.kind is NoteKind.ARRIVED:
            return
        if note.kind is NoteKind.WAITS and note.text == WaitReason.NO_WORKER.value and self._workers:
            request.met_drain |= all(worker.worker_id in self._draining for worker in self._workers.values())
        if self._offset:
            note = replace(note, time=note.time + self._offset)
        if request.notes[-1].kind is not NoteKind.ENDED:
            request.notes.append(note)
        elif note.kind is NoteKind.ENDED:
            request.notes[-1] = note

    def _ended(self, end: RequestEnded) -> None:
        key = self._key(end.frontend, end.stream)
        request = self._live.get(key)
        if request is None or request.end is not None:
            return
        request.end = end
        if request.notes[-1].kind is not NoteKind.ENDED:
            request.notes.append(_note(key, self._now, NoteKind.ENDED, f"ended: {end.reason.value}"))
        if self._watched.pop(key, None) is not None and request.report is None:
            # A stalled front end may miss the end and submit the request again.
            request.cut_at = self._now
            self._cut_off[request.arrived.spec.request_id, end.stream] = key, request
        if request.report is not None:
            del self._live[key]
        seconds = self._now - request.notes[0].time
        request_id = request.arrived.spec.request_id
        self._found.ended.append(Ended(key, request_id, seconds, self._now + self._to_wall, end.reason.value))

    def _reported(self, reported: FrontendReported) -> None:
        message = link_pb2.RequestReport.FromString(reported.report)
        key = self._key(reported.frontend, message.stream)
        request = self._live.get(key)
        if request is None:
            return
        request.report = self._report(message, request)
        if request.end is None:
            return  # The client has left, but the core does not know it yet.
        del self._live[key]
        ended = self._found.ended
        for index in range(len(ended) - 1, max(-1, len(ended) - 1000), -1):
            if ended[index].key == key:
                old = ended[index]
                seconds = request.report.submitted_s + request.report.finished_s
                ended[index] = Ended(old.key, old.request_id, seconds, old.ended_at, old.reason)
                break

    def _report(self, message: link_pb2.RequestReport, request: _Request) -> Report:
        """Return a report with times since the first submission; the front end's times count from the last one."""
        before = request.taken_over_s
        submitted_s, arrival = max(0.0, message.submitted_us / 1e6 - before), request.notes[0].time
        ended, back = self._away
        came = arrival - submitted_s
        return Report(
            submitted_s=submitted_s,
            no_scheduler_s=arrival - max(ended, came) if came < back <= arrival else 0.0,
            tokenise_s=message.tokenise_us / 1e6,
            grammar_s=message.grammar_us / 1e6,
            ended_s=message.ended_us / 1e6 + before if message.ended_us else 0.0,
            finished_s=message.finished_us / 1e6 + before,
            detokenise_s=message.detokenise_us / 1e6,
            client_s=message.client_us / 1e6,
            client_before_s=message.client_before_us / 1e6,
            stalled_s=message.stalled_us / 1e6,
        )

    # ---------------------------------------------------------------- workers

    def _hello(self, hello: ev.WorkerHello) -> None:
        if hello.worker in self._workers:
            self._lost_worker(hello.worker)
        gone = self._lost_processes.pop(hello.process, None) if hello.process else None
        if gone is not None:
            self._silent.append((gone[0], gone[1], self._now))
        self._workers[hello.worker] = _Worker(
            hello.worker_id, hello.max_draft_tokens, process=hello.process, pid=hello.pid
        )

    def _drained(self, event: ev.DrainRequested) -> None:
        self._draining.add(event.worker_id)

    def _resumed(self, event: ev.ResumeRequested) -> None:
        self._draining.discard(event.worker_id)

    def _lost(self, lost: ev.WorkerLost) -> None:
        self._lost_worker(lost.worker)

    def _lost_worker(self, peer: Peer) -> None:
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        self._lost_processes[worker.process] = worker.worker_id, self._now
        for row in worker.rows:
            self._left_row(worker, row)

    def _left_row(self, worker: _Worker, row: _Row) -> None:
        """Add a freed row to the rows for which other requests waited."""
        for request in self._watched.values():
            if not _is_in_row(request.notes):
                self._add_holding(request, worker, row)

    def _add_holding(self, request: _Request, worker: _Worker, row: _Row) -> None:
        if len(request.holdings) >= _MAX_HOLDINGS or row.key == self._key_of(request):
            return
        holder = self._live.get(row.key)
        tenant = holder.arrived.spec.tenant if holder is not None else ""
        request.holdings.append(Holding(row.key, tenant, worker.worker_id, row.since, self._now, row.num_tokens))

    def _add_holdings(self, request: _Request, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            for row in worker.rows:
                self._add_holding(request, worker, row)

    def _key_of(self, request: _Request) -> StreamKey:
        return self._key(request.arrived.frontend, request.arrived.stream)

    def _queue_noted(self, note: QueueNote) -> None:
        worker = self._workers.get(note.worker)
        if worker is not None:
            self._set_obstacle(worker, note.reason)

    def _set_obstacle(self, worker: _Worker, reason: WaitReason | None) -> None:
        worker.obstacle = reason
        for request in self._watched.values():
            if not _is_in_row(request.notes):
                request.obstacles.append(Obstacle(self._now, worker.worker_id, reason))

    def _planned(self, asked: PlanAsked) -> None:
        plan, worker = asked.plan, self._workers.get(asked.worker)
        if plan is None or worker is None:
            return

        def admit(admission: AdmissionDigest) -> _Row:
            key = self._key(admission.frontend, admission.stream)
            self._admitted(key, worker, admission.num_computed_tokens, is_first=not admission.attempt)
            return _Row(
                number=admission.row,
                prefill_left=admission.num_tokens - admission.num_computed_tokens,
                key=key,
                since=self._now,
                num_tokens=admission.num_tokens,
            )

        step = worker.rows.apply(plan, admit, partial(self._left_row, worker))
        if step.decodes is not worker.decoding:
            worker.decoding, worker.decodes = step.decodes, frozenset(row.key for row in step.decodes)
        decodes, chunks = worker.decodes, {row.key: length for row, length in step.chunks}
        copies = plan.swap_outs + plan.swap_ins
        swapped = sum(len(copy.sources) for copy in copies)
        worker.plans[plan.step] = self._now, decodes, chunks, swapped
        if worker.max_drafts:
            worker.drafting[plan.step] = {row.number: row.key for row in worker.rows}

    def _admitted(self, key: StreamKey, worker: _Worker, num_computed: int, *, is_first: bool) -> None:
        request = self._live.get(key)
        if request is None:
            return
        request.workers.add(worker.worker_id)
        if self._watched.get(key) is request:
            self._add_holdings(request, self._workers.values())
            request.placements.append((self._now, worker.worker_id))
        if request.num_cached < 0:
            request.num_cached = num_computed
        if is_first:
            for other in self._watched.values():
                if other.num_cached < 0 and other is not request and len(other.went_first) < _MAX_WENT_FIRST:
                    other.went_first.append(Passing(key, self._now, request.arrival > other.arrival))

    def _answered(self, done: ev.StepDone, timings: Timings | None) -> None:
        worker = self._workers.get(done.worker)
        plan = worker.plans.pop(done.step, None) if worker is not None else None
        if worker is None or plan is None:
            return
        planned, decodes, chunks, swapped = plan
        of_rows = worker.drafting.pop(done.step, {})
        if done.counts is not None and done.draft_counts is not None:
            for number, count, drafted in zip(done.rows, done.counts, done.draft_counts, strict=False):
                request = self._live.get(of_rows[number]) if number in of_rows else None
                if request is not None:
                    request.num_drafted += int(drafted)
                    request.num_accepted += int(count) - 1
        started = None
        if timings is not None:
            busy = (timings.forward_us + timings.sample_us) / 1e6
            began = timings.started_unix_us / 1e6
            worker.clock.learn(planned, self._now, timings.received_unix_us / 1e6, began + busy)
            started = worker.clock.to_core(began - timings.prepare_us / 1e6 - done.copy_delay_s)
        self._num_steps += 1
        is_sample = self._num_steps % (1 + self._num_steps // _MAX_SAMPLES) == 0
        is_wanted = self._wanted_step == (worker.worker_id, done.step)
        if not (is_sample or is_wanted or self._watched):
            return
        step = Step(
            worker_id=worker.worker_id,
            number=done.step,
            planned=planned,
            answered=self._now,
            started=started,
            prepare_s=timings.prepare_us / 1e6 if timings is not None else 0.0,
            forward_s=timings.forward_us / 1e6 if timings is not None else 0.0,
            sample_s=timings.sample_us / 1e6 if timings is not None else 0.0,
            copy_s=done.copy_delay_s,
            idle_s=done.idle_s,
            decodes=decodes,
            chunks=chunks,
            swapped_blocks=swapped,
        )
        if is_sample:
            self._samples.append(step)
        if is_wanted:
            self._found.steps.append(step)
        for request in self._watched.values():
            if worker.worker_id in request.workers or not _is_in_row(request.notes):
                request.steps.append(step)

    # ----------------------------------------------------------------

    def _life(self, key: StreamKey, request: _Request, usual: Usual) -> Life:
        spec, end = request.arrived.spec, request.end
        num_without_window = _num_tokens(request.notes, NO_TAIL)
        return Life(
            key=key,
            request_id=spec.request_id,
            tenant=spec.tenant,
            priority=spec.priority,
            num_prompt_tokens=spec.num_prompt_tokens,
            num_cached_tokens=max(0, request.num_cached),
            num_restored_tokens=_num_tokens(request.notes, RESTORED_TOKENS),
            num_loaded_tokens=_num_tokens(request.notes, LOADED_TOKENS),
            num_unusable_tokens=_num_tokens(request.notes, NO_CHECKPOINT) + num_without_window,
            lacks_window=num_without_window > 0,
            num_generated=end.completion_tokens if end is not None else 0,
            num_drafted=request.num_drafted,
            num_accepted=request.num_accepted,
            energy_j=end.energy_j if end is not None else 0.0,
            notes=tuple(self._with_silent(note) for note in request.notes),
            end=end.reason.value if end is not None else "",
            policy=self._policy_of(spec.request_class),
            placements=tuple(request.placements),
            obstacles=tuple(request.obstacles),
            holdings=tuple(request.holdings),
            stalls=tuple(self._stalls),
            steps=tuple(request.steps),
            report=request.report,
            met_drain=request.met_drain,
            is_cut=end is None and request.cut_at is not None,
            until=None if end is not None else self._now if request.cut_at is None else request.cut_at,
            went_first=tuple(request.went_first),
            known_tokens=min(request.known_tokens, spec.num_prompt_tokens),
            known_by=request.known_by,
            names=self._found.names,
            usual=usual,
        )

    def _policy_of(self, request_class: str) -> str:
        of_class = self._config.get("classes", {}).get(request_class)
        return str((of_class or self._config).get("policy", ""))

    def _with_silent(self, note: Note) -> Note:
        """Change a note about a lost worker into one about a silent worker if the same process came back."""
        if note.kind is not NoteKind.LOST:
            return note
        for worker_id, lost_at, back_at in self._silent:
            if abs(note.time - lost_at) < _SAME_S and note.text.startswith(f"lost {worker_id}:"):
                text = f"{worker_id} was silent; its process did not end, and was back {back_at - lost_at:.1f} s later"
                return replace(note, kind=NoteKind.SILENT, text=text)
        return note


def _note(key: StreamKey, time: float, kind: NoteKind, text: str) -> Note:
    return Note(frontend=key.frontend, stream=key.stream, time=time, kind=kind, text=text)


def _is_in_row(notes: list[Note]) -> bool:
    """Return whether a request is in a row after these notes."""
    last = next(note.kind for note in reversed(notes) if note.kind not in _OF_NO_STATE)
    return last in (NoteKind.ADMITTED, NoteKind.FIRST_TOKEN, NoteKind.HELD)


def _num_tokens(notes: list[Note], what: str) -> int:
    """Return the number of tokens before `what` in the note about a request's first admission."""
    text = next((note.text for note in notes if note.kind is NoteKind.ADMITTED), "")
    return next((int(part.removesuffix(what)) for part in text.split(", ") if part.endswith(what)), 0)


def _common_blocks(first: bytes, second: bytes) -> int:
    """Return the number of leading block keys that two requests share."""
    count = 0
    for at in range(0, min(len(first), len(second)), KEY_BYTES):
        if first[at : at + KEY_BYTES] != second[at : at + KEY_BYTES]:
            break
        count += 1
    return count


def slowest(found: Findings, most: int, since_s: float) -> list[Ended]:
    """Return the slowest requests, slowest first: live ones, and those that ended within the last `since_s`.

    Of several choices, or requests with the same id, the slowest is listed.
    """
    ended = [each for each in found.ended if each.ended_at >= found.last_wall - since_s]
    by_id: dict[tuple[Peer, str], Ended] = {}
    for each in sorted(ended + found.live, key=lambda each: -each.seconds):
        by_id.setdefault((each.key.frontend, each.request_id), each)
    return list(by_id.values())[:most]
