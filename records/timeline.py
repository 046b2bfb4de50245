"""Exports a record as a timeline for Perfetto: workers, their rows and steps, queues, blocks, and arrows between them.

The entries are read once, in order, and written immediately. Only live objects stay in memory: requests, rows, and the
blocks of rows.

The record does not list the requests that decode in a step. They follow from the plans, as in `explain.reading`.
"""

from collections.abc import Callable, Iterable
from typing import IO

from records.decoding import Opening
from records.lane import Counts, Lane, Request, Tracks
from records.perfetto import TraceWriter, Value, flow
from records.reader import Segment
from records.values import PlanAsked
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import Note, NoteKind, Peer, RequestEnded

_LEFT_ROW = frozenset((NoteKind.PREEMPTED, NoteKind.SWAPPED, NoteKind.MOVED, NoteKind.LOST, NoteKind.PREFIX_FAILED))
"""Kinds of notes after which a request has left its row and waits again."""


def export(segments: Iterable[Segment], out: IO[bytes], *, skip: int = 0) -> Counts:
    """Write a record as a Perfetto trace.

    Args:
        segments: the record, oldest first.
        out: file to write to.
        skip: number of entries at the beginning that are read but not written.

    Raises:
        UnreadableRecordError: a file is not a record, or has a newer format.
        OSError: a file cannot be read, or `out` cannot be written.
    """
    return _Timeline(out, skip).run(segments)


class _Timeline:
    """One pass over a record."""

    def __init__(self, out: IO[bytes], skip: int) -> None:
        self._trace = trace = TraceWriter(out)
        self._skip = skip
        trace.is_muted = skip > 0
        self._counts = Counts()
        self._lanes: dict[Peer, tuple[str, Lane]] = {}
        """Connected workers with their names."""
        self._tracks: dict[str, Tracks] = {}
        self._hellos: dict[Peer, ev.WorkerHello] = {}
        """Workers that the core has not accepted yet."""
        self._live: dict[tuple[Peer, int], Request] = {}
        self._num_flows = 0
        self._num_waiting = self._num_running = 0
        self._shown = (-1, -1)
        """Last values written to the two counters."""
        self._incarnation = self._next_index = -1
        self._now = 0.0
        scheduler = trace.track("scheduler")
        self._counters = tuple(
            trace.track(name, parent=scheduler, rank=rank, counts=True)
            for rank, name in enumerate(("requests running", "requests waiting"))
        )
        self._arrivals = trace.track("arrivals", parent=scheduler, rank=2)
        self._ends = trace.track("ends", parent=scheduler, rank=3)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.RequestArrived: self._arrived,
            Note: self._noted,
            RequestEnded: self._ended,
            PlanAsked: self._planned,
            ev.WorkerHello: self._hello,
            ef.WorkerWelcomed: self._welcomed,
            ev.WorkerLost: self._lost,
        }

    def run(self, segments: Iterable[Segment]) -> Counts:
        """Read all segments."""
        for segment in segments:
            opening = segment.opening
            if opening.incarnation != self._incarnation or opening.first_index != self._next_index:
                self._open(opening)
            for entry in segment:
                self._now, self._next_index = entry.time, entry.index + 1
                if isinstance(entry.what, ev.StepDone):
                    if entry.what.worker in self._lanes:
                        self._lanes[entry.what.worker][1].answered(entry.what, entry.timings, self._now)
                elif (handler := self._handlers.get(type(entry.what))) is not None:
                    handler(entry.what)
                if self._skip:
                    self._skip -= 1
                    if not self._skip:
                        self._begin_here()
        self._leave_all()
        self._counts.num_bytes = self._trace.num_bytes
        return self._counts

    def _open(self, opening: Opening) -> None:
        """Begin with the state in the opening, because no earlier entries are known."""
        self._leave_all()
        self._incarnation, self._next_index = opening.incarnation, opening.first_index
        self._now = opening.core_time
        self._trace.set_clock(self._now, opening.unix_ns)
        self._live.clear()
        self._num_running, self._num_waiting = 0, len(opening.live)
        for event, _ in opening.live:
            self._add(event).is_running = False
        for state in opening.workers:
            lane = self._join(state.hello)
            for row in state.rows:
                request = self._find(row.frontend, row.stream)
                self._set_running(request, True)
                request.worker_id = state.hello.worker_id
                lane.take_over(row, request, self._now)
        self._count()

    def _begin_here(self) -> None:
        self._trace.is_muted = False
        self._count()
        for _, lane in self._lanes.values():
            lane.begin_here(self._now)

    # ---------------------------------------------------------------- requests

    def _add(self, event: ev.RequestArrived) -> Request:
        self._num_flows += 1
        request = Request(event.spec.request_id, flow(self._num_flows), event)
        self._live[event.frontend, event.stream] = request
        return request

    def _find(self, frontend: Peer, stream: int) -> Request:
        """Return a live request. If it is unknown, return a new one named after its stream."""
        request = self._live.get((frontend, stream))
        if request is None:
            self._num_flows += 1
            request = Request(f"stream {stream}", flow(self._num_flows))
        return request

    def _arrived(self, event: ev.RequestArrived) -> None:
        known = self._live.get((event.frontend, event.stream))
        # If a request is submitted twice, the core keeps the first submission
        if known is None or known.is_running is None:
            self._add(event)

    def _noted(self, note: Note) -> None:
        request = self._live.get((note.frontend, note.stream))
        if request is None:
            return
        if note.kind is NoteKind.ARRIVED:
            request.is_running = False
            self._num_waiting += 1
            self._counts.requests += not self._trace.is_muted
            self._trace.instant(self._arrivals, note.time, request.name, request.about(), request.flow)
        elif note.kind is NoteKind.ADMITTED:
            self._set_running(request, True)
        elif note.kind in _LEFT_ROW:
            self._set_running(request, False)
            self._left_row(request, note)
        self._count()

    def _left_row(self, request: Request, note: Note) -> None:
        tracks = self._tracks.get(request.worker_id)
        if tracks is not None:
            about = {"request": request.name, "why": note.text}
            self._trace.instant(tracks.moves, note.time, note.kind.value, about, request.flow)
        if note.kind is NoteKind.LOST:
            self._leave_named(request.worker_id)

    def _ended(self, end: RequestEnded) -> None:
        request = self._live.pop((end.frontend, end.stream), None)
        if request is None:
            return
        if request.is_running:
            self._num_running -= 1
        elif request.is_running is not None:
            self._num_waiting -= 1
        about: dict[str, Value] = {"request": request.name, "completion_tokens": end.completion_tokens}
        self._trace.instant(self._ends, self._now, end.reason.value, about)
        self._count()

    def _set_running(self, request: Request, is_running: bool) -> None:
        if request.is_running is (not is_running):
            change = 1 if is_running else -1
            self._num_running += change
            self._num_waiting -= change
        request.is_running = is_running

    def _count(self) -> None:
        counts = (self._num_running, self._num_waiting)
        if self._trace.is_muted or counts == self._shown:
            return
        for track, value, shown in zip(self._counters, counts, self._shown, strict=True):
            if value != shown:
                self._trace.count(track, self._now, value)
        self._shown = counts

    # ---------------------------------------------------------------- workers

    def _hello(self, hello: ev.WorkerHello) -> None:
        self._hellos[hello.worker] = hello

    def _welcomed(self, welcomed: ef.WorkerWelcomed) -> None:
        hello = self._hellos.pop(welcomed.worker, None)
        if hello is not None:
            self._join(hello)

    def _join(self, hello: ev.WorkerHello) -> Lane:
        self._leave_named(hello.worker_id)
        tracks = self._tracks.get(hello.worker_id)
        if tracks is None:
            tracks = Tracks(self._trace, hello.worker_id, hello.num_blocks, rank=len(self._tracks) + 1)
            self._tracks[hello.worker_id] = tracks
        lane = Lane(self._trace, tracks, self._counts, self._now)
        self._lanes[hello.worker] = hello.worker_id, lane
        return lane

    def _planned(self, asked: PlanAsked) -> None:
        if asked.plan is None or asked.worker not in self._lanes:
            return
        worker_id, lane = self._lanes[asked.worker]
        admitted = [self._find(each.frontend, each.stream) for each in asked.plan.admissions]
        for request in admitted:
            request.worker_id = worker_id
        lane.planned(asked.plan, admitted, self._now)

    def _lost(self, lost: ev.WorkerLost) -> None:
        self._hellos.pop(lost.worker, None)
        self._leave(lost.worker)

    def _leave_named(self, worker_id: str) -> None:
        for peer in [peer for peer, (name, _) in self._lanes.items() if name == worker_id]:
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        _, lane = self._lanes.pop(peer, ("", None))
        if lane is not None:
            lane.leave(self._now)

    def _leave_all(self) -> None:
        for peer in list(self._lanes):
            self._leave(peer)
