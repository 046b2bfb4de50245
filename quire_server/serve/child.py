"""One child process, from its start to its end.

A child has its own session, so that Ctrl-C in the terminal reaches only the supervisor, which decides the shutdown
order. Its two output streams are read line by line. Starting a child is synchronous, so that it cannot be lost between
its start and its registration.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import IO

from quire_server.serve.layout import ChildSpec

LineHandler = Callable[[str], None]

_MAX_LINE_BYTES = 1 << 20
_FINAL_OUTPUT_TIMEOUT_S = 1.0
"""Maximum wait for the rest of a dead child's output, seconds; a grandchild may hold the pipe open."""


class Child:
    """A running process, or one that has ended."""

    def __init__(
        self, spec: ChildSpec, environment: Mapping[str, str], *, on_stdout: LineHandler, on_stderr: LineHandler
    ) -> None:
        """Start the process, from the main thread, which is the parent that `lifeline` watches.

        Raises:
            OSError: the system cannot start a process.
        """
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            spec.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._reap, name=f"reap-{spec.name}", daemon=True).start()
        self._readers = [
            asyncio.ensure_future(_read_lines(stream, handler))
            for stream, handler in ((self._process.stdout, on_stdout), (self._process.stderr, on_stderr))
        ]

    async def wait(self) -> int:
        """Wait until the process has exited and its output has ended; return the exit code, negative for a signal."""
        code = await asyncio.shield(self._exit_code)
        if self._readers:
            _, unfinished = await asyncio.wait(self._readers, timeout=_FINAL_OUTPUT_TIMEOUT_S)
            for reader in unfinished:
                reader.cancel()
        return code

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM; after the grace period, kill the process."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._exit_code), grace_s)
        except TimeoutError:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        if not self._exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _reap(self) -> None:
        code = self._process.wait()
        # The loop may already be closed if a test or a killed service did not wait for this thread.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set_exit_code, code)

    def _set_exit_code(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)


async def _read_lines(stream: IO[bytes], handler: LineHandler) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
    rest = b""
    try:
        while chunk := await reader.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                handler(line.decode(errors="replace"))
    finally:
        if rest:
            handler(rest.decode(errors="replace"))
        transport.close()
