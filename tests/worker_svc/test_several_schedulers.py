"""A worker with the addresses of several schedulers finds the one that leads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_MAX_MESSAGE
from shared.sockets import SendOutcome, bind_router, receive_from, send_to
from tests.worker_svc.values import LIMITS
from worker_svc.link.connection import Link
from worker_svc.link.identity import Identity
from worker_svc.link.session import Event, Welcomed

WAIT_MS = 20_000
ABSENT_MS = 500


class Machine:
    """The address of a scheduler, which listens only while it leads."""

    def __init__(self, address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.address, self._context = address, context

    def lead(self) -> None:
        """Begin to listen."""
        self.router = bind_router(self._context, self.address, max_message=PLAN_MAX_MESSAGE)

    def hello(self) -> bytes:
        """Return the worker that said Hello last."""
        assert self.router.poll(WAIT_MS), "no Hello"
        peer = b""
        while (received := receive_from(self.router)) is not None:
            peer, payload = received
            assert plan_pb2.WorkerMessage.FromString(payload).HasField("hello")
        return peer

    def welcome(self, peer: bytes, epoch: int, number: int) -> None:
        """Welcome a worker under a leader number."""
        welcome = plan_pb2.Welcome(max_in_flight=2, silence_ms=60_000, leader_number=number)
        message = plan_pb2.SchedulerMessage(epoch=epoch, welcome=welcome)
        assert send_to(self.router, peer, message.SerializeToString()) is SendOutcome.SENT


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield Machine(f"ipc://{tmp_path}/a", context), Machine(f"ipc://{tmp_path}/b", context)
    context.destroy(linger=0)


@pytest.fixture
def link(machines: tuple[Machine, Machine]) -> Iterator[Link]:
    """Yield a worker's link to both machines."""
    addresses = ",".join(machine.address for machine in machines)
    link = Link(addresses, Identity(worker_id="w", limits=LIMITS, model="m"))
    yield link
    link.close("the test is over")


def _next(link: Link) -> Event:
    """Return the next event."""
    for _ in range(WAIT_MS // 100):
        for event in link.receive(100):
            return event
    raise AssertionError("no event")


@pytest.mark.parametrize("leading", [0, 1])
def test_each_address_gets_a_hello_at_once(machines: tuple[Machine, Machine], link: Link, leading: int) -> None:
    """The leader welcomes the worker, whichever address it has, and the other address has no connection any more."""
    leader, other = machines[leading], machines[1 - leading]
    leader.lead()
    link.open()
    leader.welcome(leader.hello(), epoch=7, number=5)

    welcomed = _next(link)

    assert isinstance(welcomed, Welcomed)
    assert welcomed.epoch == 7
    other.lead()
    assert not other.router.poll(ABSENT_MS)


def test_a_scheduler_that_was_replaced_gets_another_hello_and_no_session(
    machines: tuple[Machine, Machine], link: Link
) -> None:
    """The worker stays with the highest number that it knows, also when the earlier leader responds first."""
    old, new = machines
    old.lead()
    new.lead()
    link.open()
    new.welcome(new.hello(), epoch=8, number=6)
    assert isinstance(_next(link), Welcomed)
    old.hello()
    link.open()
    peers = [old.hello()]
    old.welcome(peers[0], epoch=9, number=5)
    for _ in range(WAIT_MS // 100):
        assert not list(link.receive(100))
        if old.router.poll(0):
            break
    peers.append(old.hello())
    new.welcome(new.hello(), epoch=10, number=6)

    welcomed = _next(link)

    assert isinstance(welcomed, Welcomed)
    assert welcomed.epoch == 10
    assert peers[0] != peers[1]


def test_two_addresses_of_one_scheduler_are_one_worker(machines: tuple[Machine, Machine]) -> None:
    """A scheduler with two addresses, such as that of its machine and a virtual one, gets one Hello."""
    leader = machines[0]
    leader.lead()
    addresses = f"{leader.address},{leader.address.removesuffix('a')}./a"
    link = Link(addresses, Identity(worker_id="w", limits=LIMITS, model="m"))
    link.open()
    hellos = []
    while leader.router.poll(ABSENT_MS):
        hellos.append(receive_from(leader.router))
    assert len(hellos) == 1
    leader.welcome(hellos[0][0], epoch=7, number=5)  # type: ignore[index]

    assert isinstance(_next(link), Welcomed)
    link.close("the test is over")
