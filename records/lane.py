"""One worker in a timeline: its steps, its rows and the requests in them, its blocks, preemptions and copies.

The timeline applies a plan when its step begins on the worker, which the step's result shows. A row's slices therefore
nest, and step slices do not overlap, although plans are made ahead.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from records.decoding import RowAtStart
from records.perfetto import TraceWriter, Value
from records.rows import Row, Rows
from records.values import AdmissionDigest, PlanDigest, Timings
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import RequestArrived
from scheduler_svc.recorder.worker_clock import WorkerClock

_HELD = "held out"
_FIRST_ROW_RANK = 10


@dataclass(slots=True)
class Request:
    """A request in a timeline."""

    name: str
    flow: bytes
    """Id of the flow that connects the request's arrival, rows and steps."""
    event: RequestArrived | None = None
    """None if the request arrived before the record began, and has ended since."""
    is_running: bool | None = None
    """Whether the request has a worker; None if the core has not accepted the request yet."""
    worker_id: str = ""
    """Worker that last admitted the request."""

    def about(self) -> dict[str, Value]:
        """Return the arguments shown for the request."""
        if self.event is None:
            return {}
        spec = self.event.spec
        values: dict[str, Value] = {
            "prompt_tokens": spec.num_prompt_tokens,
            "max_tokens": spec.max_tokens,
            "tenant": spec.tenant,
            "request_class": spec.request_class,
            "priority": spec.priority,
        }
        return {name: value for name, value in values.items() if value}


@dataclass(slots=True)
class Counts:
    """Numbers of items in a timeline."""

    requests: int = 0
    """Arrivals."""
    steps: int = 0
    admissions: int = 0
    num_bytes: int = 0


class Tracks:
    """The tracks for one worker name; a reconnecting worker reuses them."""

    def __init__(self, trace: TraceWriter, worker_id: str, num_blocks: int, rank: int) -> None:
        self._trace = trace
        self._worker = trace.track(worker_id, rank=rank)
        self.steps = trace.track("steps", parent=self._worker, rank=0)
        self.blocks = trace.track(f"blocks held, of {num_blocks}", parent=self._worker, rank=1, counts=True)
        self.moves = trace.track("preemptions and copies", parent=self._worker, rank=2)
        self._rows: dict[int, int] = {}

    def row(self, number: int) -> int:
        track = self._rows.get(number)
        if track is None:
            track = self._trace.track(f"row {number}", parent=self._worker, rank=_FIRST_ROW_RANK + number)
            self._rows[number] = track
        return track


@dataclass(slots=True, kw_only=True)
class _Row(Row):
    request: Request
    track: int
    about: dict[str, Value]
    phase: str = ""
    """Name of the open slice within the request's slice; empty for none."""


class Lane:
    """A connected worker, from its welcome to its loss."""

    def __init__(self, trace: TraceWriter, tracks: Tracks, counts: Counts, now: float) -> None:
        self._trace, self._tracks, self._counts = trace, tracks, counts
        self._rows: Rows[_Row] = Rows()
        self._plans: deque[tuple[PlanDigest, Sequence[Request], float]] = deque()
        """Plans without a result, oldest first, each with the requests that it admits and its time."""
        self._clock = WorkerClock()
        self._block_users: Counter[int] = Counter()
        """Number of rows that use each block."""
        self._num_blocks = 0
        """Last value written to the block counter."""
        self._end = now
        """End of the last step."""
        self._decoding: Sequence[_Row] | None = None
        """Rows that decoded in the previous step; None if there was no step."""
        self._decode_flows = b""
        """Flows of the requests in `_decoding`."""

    def take_over(self, row: RowAtStart, request: Request, now: float) -> None:
        """Add a row that was in use when the record began; its blocks are unknown."""
        track = self._tracks.row(row.row)
        taken = _Row(
            number=row.row,
            prefill_left=row.prefill_left,
            is_held=row.held,
            request=request,
            track=track,
            about=request.about(),
        )
        self._rows.add(taken)
        self._begin(taken, now)

    def begin_here(self, now: float) -> None:
        """Begin slices for all rows that are in use now."""
        self._end = max(self._end, now)
        for row in self._rows:
            self._begin(row, self._end)
            if row.phase:
                self._trace.begin(row.track, self._end, row.phase)
        self._trace.count(self._tracks.blocks, self._end, self._num_blocks)

    def planned(self, plan: PlanDigest, admitted: Sequence[Request], now: float) -> None:
        """Store a plan until its step's result arrives; `admitted` are the requests that the plan admits."""
        self._plans.append((plan, admitted, now))

    def answered(self, done: ev.StepDone, timings: Timings | None, now: float) -> None:
        """Write the step to which a result belongs."""
        if not self._plans or self._plans[0][0].step != done.step:
            return
        plan, admitted, planned = self._plans.popleft()
        start, end = planned, now
        times: dict[str, Value] = {"copy_us": round(done.copy_s * 1e6), "idle_us": round(done.idle_s * 1e6)}
        if timings is not None:
            start, end = self._clock.place(
                planned,
                now,
                received=timings.received_unix_us / 1e6,
                forward_began=timings.started_unix_us / 1e6,
                before_s=timings.prepare_us / 1e6 + done.copy_delay_s,
                busy_s=(timings.forward_us + timings.sample_us) / 1e6,
            )
            times |= {"prepare_us": timings.prepare_us, "forward_us": timings.forward_us}
            times |= {"sample_us": timings.sample_us}
        start = max(start, self._end)
        self._step(plan, admitted, start, max(start, end), times)

    def leave(self, now: float) -> None:
        """End all slices, including steps without a result, because the worker is lost or the record ends."""
        end = max(now, self._end)
        while self._plans:
            plan, admitted, planned = self._plans.popleft()
            self._step(plan, admitted, max(planned, self._end), end, {"unanswered": 1})
        for row in self._rows:
            self._close(row, end)
        self._block_users.clear()
        self._count_blocks(end)

    # ---------------------------------------------------------------- steps

    def _step(
        self, plan: PlanDigest, admitted: Sequence[Request], start: float, end: float, times: dict[str, Value]
    ) -> None:
        """Apply the changes in a step's plan at the start of the step, then write the step."""
        requests = iter(admitted)
        step = self._rows.apply(
            plan,
            admit=lambda admission: self._admit(admission, next(requests), start),
            leave=lambda row: self._vacate(row, start),
        )
        grown = zip(plan.append_rows, plan.append_blocks, strict=True)
        self._block_users.update(block for number, block in grown if number in self._rows)
        if step.decodes is not self._decoding:
            self._decoding, self._decode_flows = step.decodes, self._change_phases(step.decodes, start)
        flows = self._decode_flows + b"".join([row.request.flow for row, _ in step.chunks])
        self._show(plan, start, end, times, flows)
        for row, length in step.chunks:
            about = {"step": plan.step, "tokens": length, "tokens_left": row.prefill_left}
            self._trace.begin(row.track, start, "prefill", about)
            self._trace.end(row.track, end)
        self._end = end

    def _show(self, plan: PlanDigest, start: float, end: float, times: dict[str, Value], flows: bytes) -> None:
        trace = self._trace
        if trace.is_muted:
            return
        num_prefill_tokens = sum(plan.chunk_lengths)
        arguments: dict[str, Value] = {
            "step": plan.step,
            "rows": plan.num_decodes + len(plan.chunk_rows),
            "decode_tokens": plan.num_decodes,
            "prefill_tokens": num_prefill_tokens,
        }
        rare: dict[str, Value] = {
            "admitted": len(plan.admissions),
            "left": len(plan.leaves),
            "held_out": len(plan.holds),
            "new_blocks": len(plan.append_blocks) + sum(len(each.blocks) for each in plan.admissions),
            "swapped_out_blocks": sum(len(copy.sources) for copy in plan.swap_outs),
            "swapped_in_blocks": sum(len(copy.sources) for copy in plan.swap_ins),
        }
        arguments |= {name: value for name, value in (rare | times).items() if value}
        name = "decode" if not num_prefill_tokens else "mixed" if plan.num_decodes else "prefill"
        trace.begin(self._tracks.steps, start, name if plan.num_tokens else "no tokens", arguments, flows)
        trace.end(self._tracks.steps, end)
        self._counts.steps += 1
        self._counts.admissions += len(plan.admissions)
        for what, copies in (("swap out", plan.swap_outs), ("swap in", plan.swap_ins)):
            for copy in copies:
                trace.instant(self._tracks.moves, start, what, {"blocks": len(copy.sources), "step": plan.step})
        self._count_blocks(start)

    def _count_blocks(self, now: float) -> None:
        if len(self._block_users) != self._num_blocks:
            self._num_blocks = len(self._block_users)
            self._trace.count(self._tracks.blocks, now, self._num_blocks)

    # ---------------------------------------------------------------- rows

    def _admit(self, admission: AdmissionDigest, request: Request, start: float) -> _Row:
        about = request.about() | {
            "known_tokens": admission.num_tokens,
            "computed_tokens": admission.num_computed_tokens,
            "attempt": admission.attempt,
        }
        row = _Row(
            number=admission.row,
            prefill_left=admission.num_tokens - admission.num_computed_tokens,
            blocks=list(admission.blocks),
            request=request,
            track=self._tracks.row(admission.row),
            about=about,
        )
        self._block_users.update(row.blocks)
        self._begin(row, start)
        return row

    def _vacate(self, row: _Row, start: float) -> None:
        self._close(row, start)
        for block in row.blocks:
            self._block_users[block] -= 1
            if not self._block_users[block]:
                del self._block_users[block]

    def _change_phases(self, decodes: Sequence[_Row], start: float) -> bytes:
        """Replace the slices of rows whose phase changes in this step; return the flows of decoding rows."""
        decoding = {row.number for row in decodes}
        for row in self._rows:
            phase = _HELD if row.is_held else "decode" if row.number in decoding else ""
            if phase != row.phase:
                self._end_phase(row, start)
                row.phase = phase
                if phase:
                    self._trace.begin(row.track, start, phase)
        return b"".join([row.request.flow for row in decodes])

    def _begin(self, row: _Row, start: float) -> None:
        self._trace.begin(row.track, start, row.request.name, row.about, row.request.flow)

    def _close(self, row: _Row, end: float) -> None:
        self._end_phase(row, end)
        self._trace.end(row.track, end)

    def _end_phase(self, row: _Row, end: float) -> None:
        """End the inner slice: a decoding slice at its last step's end, any other slice at the given time."""
        if row.phase:
            self._trace.end(row.track, end if row.phase == _HELD else self._end)
