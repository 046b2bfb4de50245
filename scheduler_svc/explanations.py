"""Answers operators' questions about the recording of a running service: explanations and comparisons of strategies.

Reading a recording takes seconds, so a short-lived process with low priority reads it (`records.answer`). The process
gets the query as an argument and writes the reply to a file. It waits until the recorder has written everything that
happened before the query, so that the reply includes a request that has just ended. The loop only starts the process,
and wakes up when it has exited. The process is killed when its caller disconnects.
"""

import base64
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.frontend.link import error_reply
from scheduler_svc.recorder.recorder import Recorder
from shared.errors import OverloadedError, QuireError, UnsupportedMethodError

_MAX_WAITING = 8
_MAX_S = 55.0
"""Maximum time from a question to its reply in seconds, slightly less than the front end's timeout."""

_FAILED = (
    "record: reading it took too long or failed; ask for fewer minutes, try again when the machine is less busy, or see"
    " the scheduler's log"
)
_QUESTIONS = (admin.ExplainRequest, admin.CompareStrategiesRequest, admin.PredictRequest)


@dataclass(slots=True)
class _Question:
    peer: Peer
    number: int
    payload: bytes
    """The serialized call."""
    ends_at: float


@dataclass(slots=True)
class _Process:
    question: _Question
    child: "subprocess.Popen[bytes]"
    output: IO[bytes]
    descriptor: int
    """Readable once the process has exited: the read end of a pipe that only the process can write to."""
    is_killed: bool = False
    is_wanted: bool = True
    """Whether the caller still waits."""


class LiveExplanations:
    """Questions about one record, processed one at a time."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Start without questions; `recorder` writes the record, or is None if there is no record."""
        self._recorder = recorder
        self._waiting: deque[_Question] = deque()
        self._process: _Process | None = None

    @staticmethod
    def asked(request: link_pb2.OperatorRequest) -> bool:
        """Return whether the request asks for an explanation or a comparison."""
        return request.HasField("call") and any(request.call.Is(each.DESCRIPTOR) for each in _QUESTIONS)

    def ask(self, peer: Peer, request: link_pb2.OperatorRequest, now: float) -> link_pb2.OperatorReply | None:
        """Accept a question; return a reply only if the question is refused."""
        try:
            if self._recorder is None:
                raise UnsupportedMethodError("explain: the scheduler keeps no record; start it with --record-dir")
            if len(self._waiting) >= _MAX_WAITING:
                raise OverloadedError("explain: too many explanations are requested at the same time; try again later")
        except QuireError as error:
            return error_reply(request.number, error)
        self._waiting.append(_Question(peer, request.number, request.call.SerializeToString(), now + _MAX_S))
        return None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that become readable when `replies` has a new reply."""
        return () if self._process is None else (self._process.descriptor,)

    def replies(self, now: float) -> list[tuple[Peer, link_pb2.OperatorReply]]:
        """Return the replies that have become ready, and start the next question."""
        found = []
        process = self._process
        if process is not None and process.child.poll() is not None:
            reply = _reply(process)
            if process.is_wanted:
                found.append((process.question.peer, reply))
            self._process = None
        elif process is not None and now > process.question.ends_at:
            _kill(process)
        while self._waiting and now > self._waiting[0].ends_at:
            question = self._waiting.popleft()
            found.append((question.peer, error_reply(question.number, OverloadedError(_FAILED))))
        if self._process is None and self._waiting and self._recorder is not None:
            self._process = _start(self._recorder, self._waiting.popleft(), now)
        return found

    def end(self, peer: Peer, numbers: Iterable[int]) -> None:
        """Drop a front end's questions whose callers have left."""
        self._drop({(peer, number) for number in numbers}.__contains__)

    def forget(self, peer: Peer) -> None:
        """Drop all questions from a lost front end."""
        self._drop(lambda key: key[0] == peer)

    def _drop(self, is_dropped: Callable[[tuple[Peer, int]], bool]) -> None:
        self._waiting = deque(each for each in self._waiting if not is_dropped((each.peer, each.number)))
        process = self._process
        if process is not None and is_dropped((process.question.peer, process.question.number)):
            process.is_wanted = False
            _kill(process)

    def close(self) -> None:
        """Terminate the reading process."""
        if self._process is not None:
            self._process.child.kill()
            self._process.child.wait()
            os.close(self._process.descriptor)


def _start(recorder: Recorder, question: _Question, now: float) -> _Process:
    output = tempfile.TemporaryFile()  # noqa: SIM115
    command = [sys.executable, "-m", "records.answer", str(recorder.folder)]
    # Pass a timestamp instead of a duration, because importing modules is slow on a busy machine.
    ends_at = time.monotonic() + question.ends_at - now
    command += [base64.b64encode(question.payload).decode(), f"{ends_at:.1f}"]
    exited, alive = os.pipe()
    written = recorder.when_written()
    try:
        child = subprocess.Popen(command, stdin=written, stdout=output, pass_fds=[alive])
    finally:
        os.close(alive)
        os.close(written)
    return _Process(question, child, output, exited)


def _kill(process: _Process) -> None:
    """Kill a process without waiting for it. It may take a while to exit, for example while it waits for the disk."""
    if not process.is_killed:
        process.child.kill()
        process.is_killed = True


def _reply(process: _Process) -> link_pb2.OperatorReply:
    """Return the reply that the exited process has written, or an error if the process failed or was killed."""
    process.output.seek(0)
    written = process.output.read()
    process.output.close()
    os.close(process.descriptor)
    reply = link_pb2.OperatorReply()
    if process.child.returncode == 0:
        reply.ParseFromString(written)
    else:
        reply = error_reply(0, OverloadedError(_FAILED))
    reply.number = process.question.number
    return reply
