"""Explanations for operators of a running service.

Reading a record takes seconds, so a short-lived process of low priority does it. It gets the question as an argument,
and leaves the reply in a file. The loop only starts it and looks whether it has ended.
"""

import base64
import os
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.explain.answers import answer, check
from shared.errors import FieldViolation, InvalidRequestError, OverloadedError, QuireError, UnsupportedMethodError

_MAX_WAITING = 8
_MAX_S = 55.0
"""Longest time for an explanation, s; a little less than the front end waits for it."""


@dataclass(slots=True)
class _Question:
    peer: Peer
    number: int
    payload: bytes


@dataclass(slots=True)
class _Process:
    question: _Question
    child: "subprocess.Popen[bytes]"
    output: IO[bytes]
    ends_at: float


class LiveExplanations:
    """The questions about one record; one at a time is answered."""

    def __init__(self, folder: Path | None) -> None:
        """Create without questions; `folder` is where the record is, or None if there is none."""
        self._folder = folder
        self._waiting: deque[_Question] = deque()
        self._process: _Process | None = None

    @staticmethod
    def asked(request: link_pb2.OperatorRequest) -> bool:
        """Return whether an operator asks for an explanation."""
        return request.HasField("call") and request.call.Is(admin.ExplainRequest.DESCRIPTOR)

    def ask(self, peer: Peer, request: link_pb2.OperatorRequest) -> link_pb2.OperatorReply | None:
        """Take a question; return a reply only if it is refused."""
        try:
            check(admin.ExplainRequest.FromString(request.call.value))
            if self._folder is None:
                raise UnsupportedMethodError("explain: the scheduler keeps no record; start it with --record-dir")
            if len(self._waiting) >= _MAX_WAITING:
                raise OverloadedError("explain: too many explanations are asked for at once; try again later")
        except DecodeError:
            return _refused(request.number, InvalidRequestError(FieldViolation("request", "not a valid message")))
        except QuireError as error:
            return _refused(request.number, error)
        self._waiting.append(_Question(peer, request.number, request.call.value))
        return None

    def replies(self, now: float) -> list[tuple[Peer, link_pb2.OperatorReply]]:
        """Return the replies that have become ready, and begin with the next question."""
        found = []
        process = self._process
        if process is not None and (process.child.poll() is not None or now > process.ends_at):
            found.append((process.question.peer, _reply(process)))
            self._process = None
        if self._process is None and self._waiting:
            self._process = self._start(self._waiting.popleft(), now)
        return found

    def close(self) -> None:
        """End the process that reads."""
        if self._process is not None:
            self._process.child.kill()
            self._process.child.wait()

    def _start(self, question: _Question, now: float) -> _Process:
        output = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "scheduler_svc.explain.live", str(self._folder)]
        command.append(base64.b64encode(question.payload).decode())
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)
        return _Process(question, child, output, now + _MAX_S)


def _reply(process: _Process) -> link_pb2.OperatorReply:
    """Return what a process has written; an error if it has not ended in time, or has failed."""
    process.child.kill()
    status = process.child.wait()
    process.output.seek(0)
    written = process.output.read()
    process.output.close()
    reply = link_pb2.OperatorReply()
    if status == 0:
        reply.ParseFromString(written)
    else:
        error = OverloadedError(
            "explain: reading the record took too long or failed; see the scheduler's log, or read the files with"
            " --record-dir"
        )
        reply = _refused(0, error)
    reply.number = process.question.number
    return reply


def _refused(number: int, error: QuireError) -> link_pb2.OperatorReply:
    reply = link_pb2.OperatorReply(number=number)
    reply.error.reason, reply.error.message = error.reason, error.message
    if isinstance(error, InvalidRequestError):
        (violation,) = error.violations
        reply.error.field, reply.error.message = violation.field, violation.description
    return reply


def main() -> int:
    """Answer one question; the process of `LiveExplanations`."""
    os.nice(10)
    place, payload = Path(sys.argv[1]), base64.b64decode(sys.argv[2])
    reply = link_pb2.OperatorReply()
    try:
        reply.response.Pack(answer(admin.ExplainRequest.FromString(payload), place).message())
    except QuireError as error:
        reply = _refused(0, error)
    sys.stdout.buffer.write(reply.SerializeToString())
    return 0


if __name__ == "__main__":
    sys.exit(main())
