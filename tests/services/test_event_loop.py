"""The front end's event loop calls gRPC's reader once for all completions that are pending."""

import asyncio
import socket

from services.grpc.event_loop import EventLoop


def test_pending_wakeups_are_read_together() -> None:
    """Several bytes cause one call, which reads one byte as gRPC does; a later byte causes another call."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert _calls(ours, theirs, [b"11111", b"1"]) == [b"1", b"1"]


def test_a_reader_of_a_descriptor_sees_every_byte() -> None:
    """Readers of other descriptors are not changed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert _calls(ours, theirs, [b"111"], watched=ours.fileno()) == [b"1", b"1", b"1"]


def _calls(ours: socket.socket, theirs: socket.socket, sent: list[bytes], watched: int | None = None) -> list[bytes]:
    """Send each element once the reader has read all earlier ones; return what each call of the reader read."""
    found: list[bytes] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        is_empty = asyncio.Event()

        def read() -> None:
            found.append(ours.recv(1))
            if not _has_bytes(ours):
                is_empty.set()

        loop.add_reader(ours if watched is None else watched, read)
        for part in sent:
            theirs.send(part)
            await is_empty.wait()
            is_empty.clear()
        loop.remove_reader(ours if watched is None else watched)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(run())
    return found


def _has_bytes(ours: socket.socket) -> bool:
    try:
        return bool(ours.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
