"""Spans of the scheduler: waits and attempts of traced requests, and a trace for each step with a traced request.

Request trace (the client's): a `quire.queue` span per wait and a `quire.attempt` span per placement on a worker, with
`quire.prefill` and `quire.decode` as children. The scheduler records attempts, because a worker that dies does not
export its spans.

Step trace (its own trace): `quire.step` from plan to answer; the worker continues its traceparent. Steps and attempts
link to each other. A span has at most 128 links; further links go to continuation spans. Most spans are step spans, so
only a share of the steps with a traced request gets a span (`trace_steps`).

The spans of a request that was not sampled can be made after its end, from its history (`rebuild`). They have no steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext

from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.interface.records import Note, NoteKind, Peer
from scheduler_svc.core.requests.history import Story
from shared import span_names
from shared.telemetry import MAX_LINKS, Telemetry, from_traceparent, to_traceparent

StreamKey = tuple[Peer, int]

_ROUNDING = 1e-9
"""Tolerance for rounding, because ten additions of 0.1 must reach 1."""


_OUTCOMES = {
    NoteKind.PREEMPTED: "preempted",
    NoteKind.SWAPPED: "preempted",
    NoteKind.MOVED: "moved",
    NoteKind.LOST: "worker lost",
    NoteKind.PREFIX_FAILED: "prefix failed",
}


@dataclass(slots=True)
class Placement:
    """A wait of a request and the attempt that followed, in times of the core."""

    queued: float
    admitted: float | None = None
    """End of the wait; None if the request ended while it waited."""
    prefilled: float | None = None
    """Time of the request's first token; None if it was not in this attempt."""
    has_prefill: bool = True
    """Whether the attempt began before the request's first token. The history does not contain the ends of later
    prefills.
    """
    ended: float = 0.0
    outcome: str = ""
    worker_id: str = ""


def placements(notes: Iterable[Note], outcome: str, now: float) -> list[Placement]:
    """Return the waits and attempts of a request.

    Args:
        notes: its history.
        outcome: its end reason.
        now: the time, at which open waits and attempts end.
    """
    found: list[Placement] = []
    is_open = has_token = False
    for note in notes:
        kind = note.kind
        if kind is NoteKind.ARRIVED:
            found.append(Placement(note.time))
            is_open = True
        elif not is_open:
            continue
        elif kind is NoteKind.ADMITTED:
            found[-1].admitted, found[-1].has_prefill = note.time, not has_token
            # The note reads "admitted to WORKER row NUMBER".
            found[-1].worker_id = note.text.removeprefix("admitted to ").rpartition(" row ")[0]
        elif kind is NoteKind.FIRST_TOKEN:
            found[-1].prefilled, has_token = note.time, True
        elif kind in _OUTCOMES:
            found[-1].ended, found[-1].outcome = note.time, _OUTCOMES[kind]
            found.append(Placement(note.time))
        elif kind is NoteKind.ENDED:
            found[-1].ended, found[-1].outcome = note.time, outcome
            is_open = False
    if is_open:
        found[-1].ended, found[-1].outcome = now, outcome
    return found


@dataclass(slots=True)
class _Attempt:
    span: Span
    phase: Span
    steps: list[SpanContext] = field(default_factory=list)


class SchedulerTracing:
    """Open spans, by request and by step."""

    def __init__(self, telemetry: Telemetry, clock_offset_ns: int, trace_steps: float = 1.0) -> None:
        """Start without open spans.

        Args:
            telemetry: telemetry of the process.
            clock_offset_ns: Unix time minus core time, in ns.
            trace_steps: share of the steps with a traced request that get a span, from 0 to 1.
        """
        self._trace_steps = trace_steps
        # Each step adds the share, and a step is traced when the sum reaches 1. The sum starts at 1, so the first step
        # is traced.
        self._step_share = 1.0
        self._exports = telemetry.exports
        self._tracer = telemetry.tracer
        self._forced_tracer = telemetry.forced_tracer
        self._offset = clock_offset_ns
        self._attempts: dict[StreamKey, _Attempt] = {}
        self._steps: dict[tuple[Peer, int, int], Span] = {}

    def plan_issued(self, plan: Plan, worker_id: str, now: float) -> tuple[str, dict[StreamKey, str]]:
        """Open the spans of a plan; return the traceparents of its step and of each new attempt."""
        if not self._exports:
            return "", {}
        traceparents = {
            (admission.frontend, admission.stream): self._open_attempt(admission, worker_id, now)
            for admission in plan.admissions
            if admission.spec.traceparent
        }
        keys = list(dict.fromkeys([*plan.traced_rows, *traceparents]))
        attempts = [attempt for key in keys if (attempt := self._attempts.get(key)) is not None]
        if not attempts or not self._takes_step():
            return "", traceparents
        contexts = [attempt.span.get_span_context() for attempt in attempts]
        chunks = list(_chunks(contexts))
        span = self._forced_tracer.start_span(
            span_names.STEP,
            context=trace.set_span_in_context(trace.INVALID_SPAN),
            start_time=self._unix_ns(now),
            links=chunks[0],
            attributes={
                "quire.worker": worker_id,
                "quire.epoch": f"{plan.epoch:016x}",
                "quire.step": plan.step,
                "quire.tokens": plan.num_tokens,
                "quire.decode_rows": plan.num_decodes,
                "quire.prefill_rows": len(plan.chunk_rows),
            },
        )
        self._continue(span, chunks[1:], now)
        for attempt in attempts:
            attempt.steps.append(span.get_span_context())
        self._steps[plan.worker, plan.epoch, plan.step] = span
        return to_traceparent(span), traceparents

    def step_answered(self, worker: Peer, epoch: int, step: int, now: float) -> None:
        """Close the step's span."""
        if not self._steps:
            return
        span = self._steps.pop((worker, epoch, step), None)
        if span is not None:
            span.end(self._unix_ns(now))

    def worker_lost(self, worker: Peer, now: float) -> None:
        """Close the spans of the worker's unanswered steps."""
        for key in [key for key in self._steps if key[0] == worker]:
            span = self._steps.pop(key)
            span.set_status(trace.StatusCode.ERROR, "worker lost")
            span.end(self._unix_ns(now))

    def attempt_prefilled(self, key: StreamKey, now: float) -> None:
        """Close `prefill` and open `decode`, at the first token of an attempt."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        attempt.phase.end(self._unix_ns(now))
        attempt.phase = self._tracer.start_span(
            span_names.DECODE, context=trace.set_span_in_context(attempt.span), start_time=self._unix_ns(now)
        )

    def attempt_ended(self, key: StreamKey, outcome: str, now: float) -> None:
        """Close the spans of an attempt whose request left its worker."""
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            return
        attempt.phase.end(self._unix_ns(now))
        attempt.span.set_attribute("quire.outcome", outcome)
        chunks = list(_chunks(attempt.steps))
        for link in chunks[0] if chunks else ():
            attempt.span.add_link(link.context)
        self._continue(attempt.span, chunks[1:], now)
        attempt.span.end(self._unix_ns(now))

    def rebuild(self, story: Story, traceparent: str, now: float) -> None:
        """Make the spans of a request from its history, below the span with this traceparent."""
        if not self._exports:
            return
        parent = from_traceparent(traceparent)
        for number, each in enumerate(placements(story.notes, story.outcome, now)):
            self._made(span_names.QUEUE, parent, each.queued, each.ended if each.admitted is None else each.admitted)
            if each.admitted is None:
                continue
            span = self._forced_tracer.start_span(
                span_names.ATTEMPT,
                context=parent,
                start_time=self._unix_ns(each.admitted),
                attributes={
                    "quire.request_id": story.request_id,
                    "quire.attempt": number,
                    "quire.worker": each.worker_id,
                    "quire.outcome": each.outcome,
                },
            )
            below = trace.set_span_in_context(span)
            if each.has_prefill:
                self._made(span_names.PREFILL, below, each.admitted, each.prefilled or each.ended)
            if each.prefilled is not None:
                self._made(span_names.DECODE, below, each.prefilled, each.ended)
            span.end(self._unix_ns(each.ended))

    def _made(self, name: str, parent: Context, began: float, ended: float) -> None:
        self._forced_tracer.start_span(name, context=parent, start_time=self._unix_ns(began)).end(self._unix_ns(ended))

    def _open_attempt(self, admission: RowAdmission, worker_id: str, now: float) -> str:
        parent = from_traceparent(admission.spec.traceparent)
        queue = self._tracer.start_span(
            span_names.QUEUE, context=parent, start_time=self._unix_ns(admission.queued_since)
        )
        queue.end(self._unix_ns(now))
        span = self._tracer.start_span(
            span_names.ATTEMPT,
            context=parent,
            start_time=self._unix_ns(now),
            attributes={
                "quire.request_id": admission.spec.request_id,
                "quire.attempt": admission.attempt,
                "quire.worker": worker_id,
                "quire.tokens": len(admission.token_ids),
            },
        )
        phase = self._tracer.start_span(
            span_names.PREFILL, context=trace.set_span_in_context(span), start_time=self._unix_ns(now)
        )
        self._attempts[admission.frontend, admission.stream] = _Attempt(span, phase)
        return to_traceparent(span)

    def _takes_step(self) -> bool:
        """Return whether a step with a traced request gets a span."""
        if not self._trace_steps:
            return False
        taken = self._step_share >= 1.0 - _ROUNDING
        self._step_share += self._trace_steps - taken
        return taken

    def _continue(self, span: Span, chunks: Sequence[list[Link]], now: float) -> None:
        for links in chunks:
            self._tracer.start_span(
                span_names.LINKS, context=trace.set_span_in_context(span), start_time=self._unix_ns(now), links=links
            ).end(self._unix_ns(now))

    def _unix_ns(self, now: float) -> int:
        return int(now * 1e9) + self._offset


def _chunks(contexts: Sequence[SpanContext]) -> Iterator[list[Link]]:
    for start in range(0, len(contexts), MAX_LINKS):
        yield [Link(context) for context in contexts[start : start + MAX_LINKS]]
