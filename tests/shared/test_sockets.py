"""Waiting for sockets: as short as asked for, and no message is slept through."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shared.sockets import SendOutcome, bind_router, connect_dealer, receive_from, send_to, wait_readable

Socket = zmq.Socket[bytes]
LONG_S = 10.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Socket, Socket]]:
    """A ROUTER and a DEALER that have talked."""
    context: zmq.Context[Socket] = zmq.Context()
    router = bind_router(context, f"ipc://{tmp_path}/r", max_message=1 << 20)
    dealer = connect_dealer(context, f"ipc://{tmp_path}/r", identity=b"d", max_message=1 << 20)
    dealer.send(b"hello")
    wait_readable([router], LONG_S)
    while receive_from(router) is None:
        wait_readable([router], LONG_S)
    yield router, dealer
    router.close()
    dealer.close()
    context.destroy(linger=0)


def test_a_wait_is_shorter_than_a_millisecond_if_asked_for(pair: tuple[Socket, Socket]) -> None:
    """The best of many waits of a tenth of a millisecond ends well within a millisecond."""
    shortest = LONG_S
    for _ in range(200):
        begin = time.monotonic()
        wait_readable(pair, 0.0001)
        shortest = min(shortest, time.monotonic() - begin)

    assert 0.0001 <= shortest < 0.0008


def test_every_message_ends_a_wait(pair: tuple[Socket, Socket]) -> None:
    """This includes a half-read message, and one whose arrival event a send has consumed."""
    router, dealer = pair
    begin = time.monotonic()
    for number in range(300):
        for _ in range(1 + number % 3):
            dealer.send(b"%d" % number)
        for _ in range(1 + number % 3):
            assert send_to(router, b"d", b"answer") is SendOutcome.SENT
            while receive_from(router) is None:
                wait_readable([router], LONG_S)

    assert time.monotonic() - begin < LONG_S
