"""Explanations of a running service: bounded in time from the question on, and never waited for by the loop."""

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.explanations import LiveExplanations
from scheduler_svc.recorder.recorder import Recorder

PEER = b"front/1"
PATIENCE_S = 60.0


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A recorder whose core did nothing."""
    recorder = Recorder(tmp_path, max_bytes=8 << 20, config=CoreConfig(), incarnation=1, release="test")
    yield recorder
    recorder.close()


def _question(number: int) -> link_pb2.OperatorRequest:
    request = link_pb2.OperatorRequest(number=number)
    request.call.Pack(admin.ExplainRequest(slowest=3))
    return request


def _replies(explanations: LiveExplanations, now: float) -> list[tuple[Peer, link_pb2.OperatorReply]]:
    """Request replies each time a descriptor signals that there may be one, until there is one."""
    while not (found := explanations.replies(now)):
        assert select.select(explanations.descriptors, [], [], PATIENCE_S)[0], f"no reply after {PATIENCE_S} s"
    return found


def test_a_file_that_is_no_record_is_named_in_the_refusal(recorder: Recorder) -> None:
    """A record that cannot be read is refused with the reason and the file's name."""
    (recorder.folder / "000000000000.record").write_bytes(b"something else")
    explanations = LiveExplanations(recorder)
    assert explanations.ask(PEER, _question(7), 0.0) is None

    ((peer, reply),) = _replies(explanations, 0.0)

    assert (peer, reply.number) == (PEER, 7)
    assert "000000000000.record: not a flight record" in reply.error.message


def test_a_question_that_waited_too_long_is_refused(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit counts from the question: it includes the wait for another explanation.

    A process that is too slow is killed, and its reply is read only after it has exited.
    """
    explanations = LiveExplanations(recorder)
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **pipes: popen(["sleep", "600"], **pipes))
    explanations.ask(PEER, _question(1), 0.0)
    explanations.ask(PEER, _question(2), 1.0)
    explanations.ask(PEER, _question(3), 100.0)
    assert explanations.replies(2.0) == []
    assert explanations._process is not None
    child = explanations._process.child

    ((_, waited),) = explanations.replies(100.0)
    ((_, slow),) = _replies(explanations, 100.0)

    assert (waited.number, slow.number) == (2, 1)
    assert waited.error.reason == slow.error.reason == "OVERLOADED"
    assert child.returncode == -signal.SIGKILL
    assert explanations._process is not None
    assert explanations._process.question.number == 3
    explanations.close()


def test_the_loop_does_not_wait_for_a_process_to_end(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not exit when it is killed delays only its own reply."""
    explanations = LiveExplanations(recorder)
    popen = subprocess.Popen

    class Unkillable(popen):  # type: ignore[misc,valid-type]
        def kill(self) -> None:
            pass

    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    monkeypatch.setattr(
        subprocess, "Popen", lambda _command, **pipes: Unkillable(command, **pipes | {"stdin": subprocess.PIPE})
    )
    explanations.ask(PEER, _question(1), 0.0)
    explanations.replies(0.0)
    assert explanations._process is not None
    child = explanations._process.child

    assert explanations.replies(100.0) == []
    assert child.stdin is not None
    child.stdin.close()
    ((_, reply),) = _replies(explanations, 100.0)
    assert reply.number == 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_caller_that_leaves_ends_its_question(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The query's process is killed, and waiting queries are dropped; other front ends' queries are answered."""
    explanations = LiveExplanations(recorder)
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **pipes: popen(["sleep", "600"], **pipes))
    explanations.ask(PEER, _question(1), 0.0)
    assert explanations.replies(0.0) == []
    explanations.ask(PEER, _question(2), 0.0)
    explanations.ask(b"front/2", _question(2), 0.0)
    monkeypatch.undo()
    assert explanations._process is not None
    child = explanations._process.child

    if is_lost:
        explanations.forget(PEER)
    else:
        explanations.end(PEER, [1, 2])
    ((peer, reply),) = _replies(explanations, 1.0)

    assert child.returncode == -signal.SIGKILL
    assert (peer, reply.number) == (b"front/2", 2)
    explanations.close()
