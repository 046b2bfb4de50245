"""Tail rule: exports traces of slow and failed calls that head sampling did not select.

During an unsampled call, a `TailSpan` only stores values, which is cheap. When the call ends, `TailRule` decides
whether to export it. If so, the spans are created with the stored times, and the scheduler creates the spans of the
call's streams from its histories of ended requests.

The rule selects a call if

* it failed because of a server fault;
* it missed one of its own targets;
* its time to the first token, or its mean time per further token, was above the 99th percentile of recent calls.

The rate of selected calls is limited, because most calls may fail during an incident.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from services.metrics import Output
from shared.telemetry import ReusableIds, from_traceparent, to_traceparent

WINDOW = 1000
"""Number of recent values for a percentile."""
MIN_VALUES = 100
"""Minimum number of values for a percentile."""
RENEW_EVERY = 50
"""Number of values after which the percentile is recomputed."""
PER_S = 5.0
"""Maximum long-term rate of selected calls in one front end, 1/s."""
BURST = 10
"""Maximum number of calls selected in a burst."""
MAX_STREAMS = 4
"""Maximum number of streams per call whose spans are rebuilt."""
MAX_PARTS = 32
"""Number of child spans that are kept for a call."""


class Recent:
    """99th percentile of recent values, recomputed from time to time."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._num_new = 0
        self._limit = float("inf")

    def exceeds(self, value: float) -> bool:
        """Return whether a value is above the percentile of the earlier values, and add the value."""
        is_above = value > self._limit
        self._values.append(value)
        self._num_new += 1
        if self._num_new >= RENEW_EVERY and len(self._values) >= MIN_VALUES:
            self._num_new = 0
            self._limit = sorted(self._values)[len(self._values) * 99 // 100]
        return is_above


class TailRule:
    """Decides which calls to export; without I/O and clocks."""

    def __init__(self) -> None:
        self._first, self._further = Recent(), Recent()
        self._room = float(BURST)
        self._refilled_at = 0.0

    def reason(self, outputs: Iterable[Output], *, is_failed: bool, now: float) -> str:
        """Return the reason why a call is selected: "failed", "target" or "slow"; "" if it is not selected.

        Args:
            outputs: the outputs of the call.
            is_failed: whether it failed by a fault of the server.
            now: the time, s.
        """
        is_slow = has_missed = False
        for output in outputs:
            for recent, seconds in ((self._first, output.first), (self._further, output.per_token)):
                is_slow |= seconds is not None and recent.exceeds(seconds)
            has_missed |= any(not is_met for _, is_met in output.targets())
        reason = "failed" if is_failed else "target" if has_missed else "slow" if is_slow else ""
        if not reason:
            return ""
        self._room = min(BURST, self._room + PER_S * max(0.0, now - self._refilled_at))
        self._refilled_at = now
        if self._room < 1:
            return ""
        self._room -= 1
        return reason


class TailSpan(NonRecordingSpan):
    """Span of a call that is exported only if the tail rule selects the call."""

    def __init__(
        self,
        context: SpanContext,
        tracing: "TailTracing",
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        traceparent: str,
    ) -> None:
        """Begin now; `traceparent` is the client's."""
        super().__init__(context)
        self._tracing = tracing
        self.name, self.kind, self.traceparent = name, kind, traceparent
        self.began_ns = time.time_ns()
        self.attributes: dict[str, AttributeValue] = dict(attributes)
        self.status: Status | None = None
        self.parts: list[tuple[str, int, int]] = []
        """Child spans: name, begin and end, Unix ns."""
        self.streams: list[int] = []
        """Numbers of the call's streams on the link."""
        self.outputs: list[Output] = []

    def is_recording(self) -> bool:
        """Return True, because attributes are kept."""
        return True

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Keep an attribute."""
        self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Keep attributes."""
        self.attributes.update(attributes)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Keep the status."""
        self.status = status if isinstance(status, Status) else Status(status, description)

    def end(self, end_time: int | None = None) -> None:
        """Export the call if the rule takes it."""
        self._tracing.ended(self, end_time or time.time_ns())


class TailTracing:
    """The tail rule of a front end, with the tracer and the connection to the scheduler."""

    def __init__(self, tracer: Tracer, ids: ReusableIds, report: Callable[[int, str], None]) -> None:
        """Start with no recent calls.

        Args:
            tracer: tracer without sampling.
            ids: source of its ids.
            report: requests the spans of a stream from the scheduler, given the stream's number and its call's
                traceparent.
        """
        self._tracer, self._ids = tracer, ids
        self._report = report
        self._rule = TailRule()

    def begin(
        self,
        context: SpanContext,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue],
        traceparent: str,
    ) -> TailSpan:
        """Return a span for an unsampled call; `context` is the call's context."""
        return TailSpan(context, self, name, kind, attributes, traceparent)

    def ended(self, call: TailSpan, ended_ns: int) -> None:
        """Export an ended call if the rule selects it."""
        status = call.status
        # A disconnected client is not a server error.
        is_failed = (
            status is not None
            and status.status_code is StatusCode.ERROR
            and call.attributes.get("error.type") != "CANCELLED"
        )
        reason = self._rule.reason(call.outputs, is_failed=is_failed, now=time.monotonic())
        if not reason:
            return
        self._ids.reuse(call.get_span_context())
        root = self._tracer.start_span(
            call.name,
            context=from_traceparent(call.traceparent),
            kind=call.kind,
            attributes=call.attributes | {"quire.tail": reason},
            start_time=call.began_ns,
        )
        if status is not None:
            root.set_status(status)
        below = trace.set_span_in_context(root)
        for name, began_ns, part_ended_ns in call.parts:
            self._tracer.start_span(name, context=below, start_time=began_ns).end(part_ended_ns)
        traceparent = to_traceparent(root)
        for number in call.streams[:MAX_STREAMS]:
            self._report(number, traceparent)
        root.end(ended_ns)


@contextmanager
def part_span(tracer: Tracer, name: str) -> Iterator[Span]:
    """Start a child of the current span; if that is a `TailSpan`, the child stores only times."""
    parent = trace.get_current_span()
    began_ns = time.time_ns()
    try:
        with tracer.start_as_current_span(name, record_exception=False) as span:
            yield span
    finally:
        if isinstance(parent, TailSpan) and len(parent.parts) < MAX_PARTS:
            parent.parts.append((name, began_ns, time.time_ns()))


def note_stream(span: Span, number: int, output: Output | None = None) -> None:
    """Record a stream and its outcome for the tail rule; `number` is 0 if the stream was not submitted."""
    if isinstance(span, TailSpan):
        if number:
            span.streams.append(number)
        if output is not None:
            span.outputs.append(output)
