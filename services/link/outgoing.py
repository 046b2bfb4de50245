"""Messages to the core, collected during one iteration of the event loop and sent together.

The size of a frame is limited, so many simultaneous submissions (after a core was lost) are sent as several messages.
"""

from protos.quire.link.v1 import link_pb2
from shared.columns import to_column
from shared.packing import Packer, check_part, in_parts

_MATCH_BYTES = 16
"""Maximum size of a stop match in a message, bytes."""
_MAX_REPORTED_CALLS = 1024
"""Maximum number of finished calls that are reported in one turn."""


class Outgoing:
    """Events from one turn of the event loop."""

    __slots__ = (
        "_cancelled",
        "_credit",
        "_detached",
        "_ended_orders",
        "_goodbye",
        "_matches",
        "_operator_requests",
        "_report",
        "_reported_calls",
        "_resume_questions",
        "_snapshot_request",
        "_submissions",
        "_traced",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Discard all events."""
        self._submissions: list[tuple[link_pb2.Submission, int]] = []
        """Submissions with their sizes in bytes."""
        self._cancelled: list[int] = []
        self._detached: list[int] = []
        self._resume_questions: list[link_pb2.ResumeQuestion] = []
        self._matches: dict[int, int] = {}
        self._credit: dict[int, int] = {}
        self._report: link_pb2.MetricReport | None = None
        self._reported_calls: list[link_pb2.RequestReport] = []
        self._traced: list[link_pb2.TracedStream] = []
        self._snapshot_request = 0
        self._operator_requests: list[link_pb2.OperatorRequest] = []
        self._ended_orders: list[int] = []
        self._goodbye = False

    def goodbye(self) -> None:
        """Mark these messages as the last messages of the connection."""
        self._goodbye = True

    def submit(self, submission: link_pb2.Submission) -> None:
        """Add a submission.

        Raises:
            FrameTooLargeError: it does not fit into a frame; the others are not affected.
        """
        size = submission.ByteSize()
        check_part(size, f"request {submission.request_id}")
        self._submissions.append((submission, size))

    @property
    def submissions(self) -> list[link_pb2.Submission]:
        """Submissions that were not sent yet, oldest first."""
        return [submission for submission, _ in self._submissions]

    def cancel(self, stream: int) -> None:
        """Add the cancellation of a stream whose client disconnected."""
        self._cancelled.append(stream)
        self._credit.pop(stream, None)

    def detach(self, stream: int) -> None:
        """Add the detachment of a stream whose client disconnected and may resume."""
        self._detached.append(stream)
        self._credit.pop(stream, None)

    def ask_resume(self, number: int, identity: bytes) -> None:
        """Add a question for a kept request."""
        self._resume_questions.append(link_pb2.ResumeQuestion(number=number, identity=identity))

    def stop_match(self, stream: int, keep_tokens: int) -> None:
        """Add a stop string match."""
        self._matches[stream] = keep_tokens

    def credit(self, stream: int, credit: int) -> None:
        """Add returned credit, bytes."""
        self._credit[stream] = self._credit.get(stream, 0) + credit

    def report(self, report: link_pb2.MetricReport, snapshot_request: int = 0) -> None:
        """Add the front end's metrics. A `snapshot_request` > 0 requests the metrics of all processes."""
        self._report = report
        self._snapshot_request = snapshot_request or self._snapshot_request

    def report_call(self, report: link_pb2.RequestReport) -> None:
        """Add the report of a finished call, unless very many wait already."""
        if len(self._reported_calls) < _MAX_REPORTED_CALLS:
            self._reported_calls.append(report)

    def trace(self, stream: int, traceparent: str) -> None:
        """Add the request for the spans of an ended stream."""
        self._traced.append(link_pb2.TracedStream(stream=stream, traceparent=traceparent))

    def operate(self, request: link_pb2.OperatorRequest) -> None:
        self._operator_requests.append(request)

    def end_order(self, number: int) -> None:
        """Tell the core that the caller no longer waits for a live view or a reply."""
        self._ended_orders.append(number)

    def take(self) -> list[bytes]:
        """Return the messages to send, oldest first, and clear the events."""
        packer = Packer(link_pb2.FrontendMessage)
        for submission, size in self._submissions:
            packer.message_for(size, "submission").submissions.append(submission)
        for streams in in_parts(self._cancelled, 4):
            packer.message_for(4 * len(streams), "cancelled").cancelled = to_column(streams)
        for streams in in_parts(self._detached, 4):
            packer.message_for(4 * len(streams), "detached").detached = to_column(streams)
        for question in self._resume_questions:
            packer.message_for(question.ByteSize(), "resume question").resume_questions.append(question)
        for matches in in_parts(list(self._matches.items()), _MATCH_BYTES):
            message = packer.message_for(_MATCH_BYTES * len(matches), "stop matches")
            for stream, keep_tokens in matches:
                message.stop_matches.add(stream=stream, keep_tokens=keep_tokens)
        for streams in in_parts(list(self._credit), 8):
            message = packer.message_for(8 * len(streams), "credit")
            message.credit_streams = to_column(streams)
            message.credit_bytes = to_column([self._credit[stream] for stream in streams])
        if self._report is not None:
            packer.message_for(self._report.ByteSize(), "metrics").report.CopyFrom(self._report)
        for report in self._reported_calls:
            packer.message_for(report.ByteSize(), "report of a call").request_reports.append(report)
        for traced in self._traced:
            packer.message_for(traced.ByteSize(), "traced stream").traced.append(traced)
        for request in self._operator_requests:
            packer.message_for(request.ByteSize(), "operator request").operator_requests.append(request)
        last = packer.messages[-1]
        last.snapshot_request = self._snapshot_request
        last.goodbye = self._goodbye
        last.ended_orders.extend(self._ended_orders)
        self.clear()
        return [payload for payload in (message.SerializeToString() for message in packer.messages) if payload]
