"""One child process, from its start to its end.

It has a session of its own, so that the terminal's Ctrl-C reaches only the supervisor, who decides the order
in which things end. Its two output streams are read line by line. Starting one is synchronous: between the
decision to start it and its being known there is no point at which it could be forgotten.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import IO

from quire.serve.layout import ChildSpec

LineHandler = Callable[[str], None]

_LONGEST_LINE = 1 << 20
_LAST_WORDS_S = 1.0
"""How long to wait for the end of a dead child's output; a process it started may hold the pipe open."""


class Child:
    """A running process, or one that has ended."""

    def __init__(
        self, spec: ChildSpec, environment: Mapping[str, str], *, on_stdout: LineHandler, on_stderr: LineHandler
    ) -> None:
        """Starts it; must be called in the main thread, which is the parent that `lifeline` watches.

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
        """Waits for its end and its last words; the exit code, negative for a signal."""
        code = await asyncio.shield(self._exit_code)
        if self._readers:
            _, unfinished = await asyncio.wait(self._readers, timeout=_LAST_WORDS_S)
            for reader in unfinished:
                reader.cancel()
        return code

    async def end(self, grace_s: float) -> None:
        """Asks it to end, and kills it when it has not done so after the grace period."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._exit_code), grace_s)
        except TimeoutError:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Ends it and everything that it started, at once."""
        if not self._exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _reap(self) -> None:
        code = self._process.wait()
        # The loop may be gone when a test or a killed service did not wait for us.
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
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                handler(line.decode(errors="replace"))
    finally:
        if rest:
            handler(rest.decode(errors="replace"))
        transport.close()
