"""The scheduler is notified of kernel compilations before the step that needs them is late."""

from collections.abc import Iterator

import pytest
import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_MAX_MESSAGE, PLAN_VERSIONS
from shared.sockets import SendOutcome, bind_router, endpoint, receive_from, send_to
from tests.worker_svc.values import LIMITS
from worker_svc.device.compiling import LONGEST_COMPILE_MS, announce_compiling
from worker_svc.link.connection import Link
from worker_svc.link.identity import Identity
from worker_svc.link.session import Welcomed

triton = pytest.importorskip("triton", reason="without triton nothing is compiled")

WAIT_MS = 20_000


class _Kernel:
    name = "_some_kernel"


def launch_something_new() -> None:
    """What Triton does when a launch finds its kernel not compiled."""
    hook = triton.knobs.runtime.jit_cache_hook
    if hook is not None:
        hook(key="", repr="", fn=_Kernel, compile={}, is_manual_warmup=False, already_compiled=False)


@pytest.fixture
def router() -> Iterator["zmq.Socket[bytes]"]:
    """Yield a router socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield bind_router(context, "tcp://127.0.0.1:0", max_message=PLAN_MAX_MESSAGE)
    context.destroy(linger=0)


def receive(router: "zmq.Socket[bytes]") -> tuple[bytes, plan_pb2.WorkerMessage]:
    """Return the next message with its sender."""
    assert router.poll(WAIT_MS), "the worker says nothing"
    received = receive_from(router)
    assert received is not None
    return received[0], plan_pb2.WorkerMessage.FromString(received[1])


def test_the_scheduler_hears_of_a_compilation_in_its_epoch(router: "zmq.Socket[bytes]") -> None:
    """A kernel compiled in an epoch is reported with its time limit; outside an epoch or the block, nothing is sent."""
    link = Link(endpoint(router), Identity(worker_id="w", limits=LIMITS, model="m"))
    with announce_compiling(link.send_compiling):
        link.open()
        launch_something_new()
        peer, hello = receive(router)
        welcome = plan_pb2.SchedulerMessage(epoch=7, welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=60_000))
        assert send_to(router, peer, welcome.SerializeToString()) is SendOutcome.SENT
        assert Welcomed(7, 2, PLAN_VERSIONS.oldest) in link.receive(WAIT_MS)
        launch_something_new()
    _, told = receive(router)
    launch_something_new()
    link.close("done")
    _, last = receive(router)

    assert hello.WhichOneof("body") == "hello"
    assert (told.epoch, told.compiling.expected_ms) == (7, LONGEST_COMPILE_MS)
    assert last.WhichOneof("body") == "goodbye"
