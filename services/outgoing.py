"""What the front end has to tell the core, gathered over one turn of the event loop and sent as few messages.

Everything that happens while the loop handles one batch of events leaves together. A frame is bounded, so many
submissions at once (after a core was lost) make several messages; their order is kept.
"""

from protos.quire.link.v1 import link_pb2
from shared.columns import to_column

MAX_FRAME = 4 << 20
"""Submissions beyond this many bytes go into a further message; one alone may be larger."""


class Outgoing:
    """The events of one turn."""

    __slots__ = (
        "_cancelled",
        "_credit",
        "_detached",
        "_goodbye",
        "_hello",
        "_matches",
        "_operator_requests",
        "_report",
        "_resume_questions",
        "_snapshot_request",
        "_submissions",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self._hello: link_pb2.FrontendHello | None = None
        self._submissions: list[link_pb2.Submission] = []
        self._cancelled: list[int] = []
        self._detached: list[int] = []
        self._resume_questions: list[link_pb2.ResumeQuestion] = []
        self._matches: dict[int, int] = {}
        self._credit: dict[int, int] = {}
        self._report: link_pb2.MetricReport | None = None
        self._snapshot_request = 0
        self._operator_requests: list[link_pb2.OperatorRequest] = []
        self._goodbye = False

    def hello(self, hello: link_pb2.FrontendHello) -> None:
        """Presents the front end."""
        self._hello = hello

    def goodbye(self) -> None:
        """Nothing comes after this turn."""
        self._goodbye = True

    def submit(self, submission: link_pb2.Submission) -> None:
        """A new request."""
        self._submissions.append(submission)

    def cancel(self, stream: int) -> None:
        """A stream whose client has gone."""
        self._cancelled.append(stream)
        self._credit.pop(stream, None)

    def detach(self, stream: int) -> None:
        """A stream whose client has gone and may come back."""
        self._detached.append(stream)
        self._credit.pop(stream, None)

    def ask_resume(self, number: int, identity: bytes) -> None:
        """A client wants to go on with a request."""
        self._resume_questions.append(link_pb2.ResumeQuestion(number=number, identity=identity))

    def stop_match(self, stream: int, keep_tokens: int) -> None:
        """A stop string was found."""
        self._matches[stream] = keep_tokens

    def credit(self, stream: int, credit: int) -> None:
        """The reader took so many bytes."""
        self._credit[stream] = self._credit.get(stream, 0) + credit

    def report(self, report: link_pb2.MetricReport, snapshot_request: int = 0) -> None:
        """The front end's metrics, with or without asking for everybody's."""
        self._report = report
        self._snapshot_request = snapshot_request or self._snapshot_request

    def operate(self, request: link_pb2.OperatorRequest) -> None:
        """An operator asks something."""
        self._operator_requests.append(request)

    def take(self) -> list[bytes]:
        """The messages to send, oldest first."""
        messages = [link_pb2.FrontendMessage()]
        if self._hello is not None:
            messages[0].hello.CopyFrom(self._hello)
        size = 0
        for submission in self._submissions:
            submission_size = submission.ByteSize()
            if size and size + submission_size > MAX_FRAME:
                messages.append(link_pb2.FrontendMessage())
                size = 0
            messages[-1].submissions.append(submission)
            size += submission_size
        last = messages[-1]
        if self._cancelled:
            last.cancelled = to_column(self._cancelled)
        if self._detached:
            last.detached = to_column(self._detached)
        last.resume_questions.extend(self._resume_questions)
        for stream, keep_tokens in self._matches.items():
            last.stop_matches.add(stream=stream, keep_tokens=keep_tokens)
        if self._credit:
            last.credit_streams = to_column(list(self._credit))
            last.credit_bytes = to_column(list(self._credit.values()))
        if self._report is not None:
            last.report.CopyFrom(self._report)
        last.snapshot_request = self._snapshot_request
        last.operator_requests.extend(self._operator_requests)
        last.goodbye = self._goodbye
        self.clear()
        return [payload for payload in (message.SerializeToString() for message in messages) if payload]
