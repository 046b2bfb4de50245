"""Worker spans: one per traced step and one per traced row, with links in both directions.

A *step* span is a child of the scheduler's step span and links to the rows in the step. Links beyond the SDK's limit go
to continuation spans. A *row* span is a child of the attempt's span. It lasts from admission until the row leaves or
the epoch ends, and links to the first steps of the row. An untraced row or step costs one lookup in an empty dict.
Spans contain no prompt content.
"""

from dataclasses import dataclass

import numpy as np
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Tracer, get_current_span

from shared import span_names
from shared.telemetry import MAX_LINKS, from_traceparent
from worker_svc.execution.batch import StepBatch
from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import Plan


@dataclass(slots=True)
class _TracedRow:
    span: Span
    computed_before: int
    """Tokens whose KV was computed before admission."""
    num_links: int = 0
    num_drafts: int = 0
    """Verified draft tokens."""
    num_accepted: int = 0


class Tracing:
    """Spans of one engine. Times are Unix nanoseconds."""

    def __init__(self, tracer: Tracer, max_rows: int, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._rows: dict[int, _TracedRow] = {}
        self._is_traced = np.zeros(max_rows, np.bool_)

    def rows_admitted(self, plan: Plan, now: int) -> None:
        """Start the spans of the plan's traced admissions."""
        for admission in plan.admissions:
            parent = _parent(admission.traceparent)
            if parent is None:
                continue
            span = self._tracer.start_span(
                span_names.WORKER_ROW,
                parent,
                attributes={
                    "quire.worker": self._worker_id,
                    "quire.request_id": admission.request_id,
                    "quire.row": admission.row,
                    "quire.generation": admission.generation,
                    "quire.prompt_tokens": admission.num_prompt_tokens,
                },
                start_time=now,
            )
            if span.is_recording():
                self._rows[admission.row] = _TracedRow(span, admission.num_computed_tokens)
                self._is_traced[admission.row] = True

    def rows_left(self, rows: IntArray, num_computed: IntArray, now: int) -> None:
        """End the rows' spans; `num_computed` is indexed by row."""
        if not self._rows:
            return
        for row in rows[self._is_traced[rows]].tolist():
            traced = self._rows.pop(row)
            traced.span.set_attribute("quire.tokens_computed", int(num_computed[row]) - traced.computed_before)
            if traced.num_drafts:
                traced.span.set_attribute("quire.draft_tokens", traced.num_drafts)
                traced.span.set_attribute("quire.accepted_draft_tokens", traced.num_accepted)
            traced.span.end(now)
        self._is_traced[rows] = False

    def verified(self, rows: IntArray, drafts: IntArray, accepted: IntArray) -> None:
        """Count the drafts that each row verified and accepted in a step."""
        if not self._rows:
            return
        for row, num_drafts, num_accepted in zip(rows.tolist(), drafts.tolist(), accepted.tolist(), strict=True):
            if row in self._rows:
                self._rows[row].num_drafts += num_drafts
                self._rows[row].num_accepted += num_accepted

    def begin_step(self, plan: Plan, batch: StepBatch | None, now: int) -> tuple[Span, ...]:
        """Start the step's span and its continuations; return no span if the step is not traced."""
        parent = _parent(plan.traceparent)
        if parent is None:
            return ()
        traced = [] if batch is None else [self._rows[row] for row in batch.rows[self._is_traced[batch.rows]].tolist()]
        attributes: dict[str, str | int] = {
            "quire.worker": self._worker_id,
            "quire.step": plan.step,
            "quire.rows": 0 if batch is None else len(batch.rows),
            "quire.tokens": 0 if batch is None else batch.num_tokens,
            "quire.prefill_tokens": 0 if batch is None else batch.num_prefill_tokens,
        }
        spans = []
        for start in range(0, max(len(traced), 1), MAX_LINKS):
            linked = traced[start : start + MAX_LINKS]
            span = self._tracer.start_span(
                span_names.WORKER_STEP,
                parent,
                attributes=attributes | ({"quire.continuation": start // MAX_LINKS} if start else {}),
                links=[Link(row.span.get_span_context()) for row in linked],
                start_time=now,
            )
            spans.append(span)
            _link_rows(linked, span.get_span_context())
        return tuple(spans)

    def end_step(self, spans: tuple[Span, ...], now: int) -> None:
        """End the spans that `begin_step` started."""
        for span in spans:
            span.end(now)


def _parent(traceparent: str) -> Context | None:
    """Return the parent context of a new span; None if `traceparent` is empty or invalid."""
    if not traceparent:
        return None
    context = from_traceparent(traceparent)
    return context if get_current_span(context).get_span_context().is_valid else None


def _link_rows(rows: list[_TracedRow], step: SpanContext) -> None:
    for row in rows:
        if row.num_links < MAX_LINKS:
            row.num_links += 1
            row.span.add_link(step)
