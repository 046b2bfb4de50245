"""A front end whose core is a script: a test sends the parts of the live view that a page shows."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from tests.services.stack import Stack, TestCore, running_stack


class Scripted:
    """A front end in a thread, and the core behind it."""

    def __init__(self, folder: Path) -> None:
        self.address = ""
        self._folder = folder
        self._ready, self._ended = threading.Event(), threading.Event()
        self._stack: Stack
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def say(self, part: admin.WatchStepsResponse) -> None:
        """Sends a part to the viewer, once the viewer has asked for parts."""
        core = self._stack.core
        asyncio.run_coroutine_threadsafe(core.saw(lambda seen: bool(_numbers(seen))), self._loop).result()
        number = _numbers(core)[-1]
        view = link_pb2.View(number=number, response=part.SerializeToString())
        core.say(link_pb2.CoreMessage(incarnation=core.incarnation, views=[view]).SerializeToString())

    def end(self) -> None:
        """Ends the front end."""
        self._ended.set()
        self._thread.join(60)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with running_stack(self._folder) as self._stack:
            self.address = f"127.0.0.1:{self._stack.http.base_url.port}"
            self._ready.set()
            await asyncio.to_thread(self._ended.wait)


def _numbers(core: TestCore) -> list[int]:
    """Return the numbers of the operator requests that a core has received."""
    return [request.number for message in core.messages for request in message.operator_requests]


@contextlib.contextmanager
def scripted(folder: Path) -> Iterator[Scripted]:
    """Start a front end without a scheduler."""
    found = Scripted(folder)
    try:
        yield found
    finally:
        found.end()
