"""Spans of the worker: one per traced step, one per traced row, linked both ways.

A *step* span is the child of the scheduler's step span and links to the rows in it; links beyond what the SDK keeps go
to continuation spans. A *row* span is the child of the attempt's span, lives from admission until the row leaves or the
epoch ends, and links to the first steps that it took part in. Without traced rows and steps nothing here costs more
than a look at an empty dict. Nothing of a prompt is ever recorded.
"""

from dataclasses import dataclass

import numpy as np
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Tracer, get_current_span

from protos.quire.plan.v1 import plan_pb2
from shared.telemetry import MAX_LINKS, from_traceparent
from worker_svc.batch import StepBatch
from worker_svc.block_tables import IntArray


@dataclass(slots=True)
class _TracedRow:
    span: Span
    computed_before: int
    """Tokens whose KV was there at admission."""
    num_links: int = 0


class Tracing:
    """The spans of one engine. Times are Unix nanoseconds."""

    def __init__(self, tracer: Tracer, max_rows: int) -> None:
        self._tracer = tracer
        self._rows: dict[int, _TracedRow] = {}
        self._is_traced = np.zeros(max_rows, np.bool_)

    def rows_admitted(self, plan: plan_pb2.Plan, now: int) -> None:
        """Begins the spans of the plan's admissions that are traced."""
        for admission in plan.admissions:
            parent = _parent(admission.traceparent)
            if parent is None:
                continue
            span = self._tracer.start_span(
                "worker.row",
                parent,
                attributes={
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
        """Ends the spans of rows; `num_computed` is indexed by row."""
        if not self._rows:
            return
        for row in rows[self._is_traced[rows]].tolist():
            traced = self._rows.pop(row)
            traced.span.set_attribute("quire.tokens_computed", int(num_computed[row]) - traced.computed_before)
            traced.span.end(now)
        self._is_traced[rows] = False

    def begin_step(self, plan: plan_pb2.Plan, batch: StepBatch | None, now: int) -> tuple[Span, ...]:
        """Begins the step's span and its continuations; none when the step is not traced."""
        parent = _parent(plan.traceparent)
        if parent is None:
            return ()
        traced = [] if batch is None else [self._rows[row] for row in batch.rows[self._is_traced[batch.rows]].tolist()]
        attributes = {
            "quire.step": plan.step,
            "quire.rows": 0 if batch is None else len(batch.rows),
            "quire.tokens": 0 if batch is None else batch.num_tokens,
            "quire.prefill_tokens": 0 if batch is None else batch.num_prefill_tokens,
        }
        spans = []
        for start in range(0, max(len(traced), 1), MAX_LINKS):
            linked = traced[start : start + MAX_LINKS]
            span = self._tracer.start_span(
                "worker.step",
                parent,
                attributes=attributes | ({"quire.continuation": start // MAX_LINKS} if start else {}),
                links=[Link(row.span.get_span_context()) for row in linked],
                start_time=now,
            )
            spans.append(span)
            _link_rows(linked, span.get_span_context())
        return tuple(spans)

    def end_step(self, spans: tuple[Span, ...], now: int) -> None:
        """Ends what `begin_step` began."""
        for span in spans:
            span.end(now)


def _parent(traceparent: str) -> Context | None:
    """The context to start a child in; None when the text names no span, so that no trace begins here."""
    if not traceparent:
        return None
    context = from_traceparent(traceparent)
    return context if get_current_span(context).get_span_context().is_valid else None


def _link_rows(rows: list[_TracedRow], step: SpanContext) -> None:
    for row in rows:
        if row.num_links < MAX_LINKS:
            row.num_links += 1
            row.span.add_link(step)
