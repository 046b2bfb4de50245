"""What a scheduler that starts hears from a worker that reconnects."""

import os
import time
from pathlib import Path

import pytest
import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_MAX_MESSAGE
from shared.sockets import bind_router, receive_from
from tests.worker_svc.values import LIMITS
from worker_svc.link.connection import Link
from worker_svc.link.identity import Identity

WAIT_MS = 20_000
PAUSE_MS = 300
NUM_SOCKETS = 3
"""Sockets of a connection: its own, and two of its monitor. Each has one file descriptor."""


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_scheduler_that_starts_during_the_pause_hears_one_hello(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that pauses before its next Hello does not deliver the Hello before, which it would replace at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/w"
    link = Link(address, Identity(worker_id="w", limits=LIMITS, model="m"))
    routers: list[zmq.Socket[bytes]] = []
    heard: list[int] = []

    def start_scheduler(_seconds: float) -> None:
        # ZeroMQ closes sockets in a thread of its own.
        end = time.monotonic() + WAIT_MS / 1000
        while _num_descriptors() > num_open - NUM_SOCKETS:
            assert time.monotonic() < end, "the old sockets were not closed"
        routers.append(bind_router(context, address, max_message=PLAN_MAX_MESSAGE))
        heard.append(routers[0].poll(PAUSE_MS))

    link.open()
    num_open = _num_descriptors()
    monkeypatch.setattr("worker_svc.link.connection.time.sleep", start_scheduler)
    link.open()
    (router,) = routers
    assert router.poll(WAIT_MS)
    received = receive_from(router)
    assert received is not None
    hello = plan_pb2.WorkerMessage.FromString(received[1]).hello
    link.close("the test is over")
    context.destroy(linger=0)

    assert heard == [0]
    assert hello.incarnation == link.incarnation
