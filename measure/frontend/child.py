"""Child processes of these benchmarks. They communicate in lines, and every wait has a timeout."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shared.cpu_time import cpu_seconds

PATIENCE_S = 60.0
"""Maximum time to wait for a line of a child, seconds."""
_END_S = 10.0
_ERROR_LINES = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ChildError(RuntimeError):
    """A child exited or did not respond. The message contains the last lines of its log."""


class Child:
    """A child process that is terminated at the end of the `with` block."""

    def __init__(self, folder: Path, module: str, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        """Run `python -m module`, with `environ` added to the environment; write its log into `folder`."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._name = " ".join([module, *(each for each in arguments if not each.startswith("-"))])
        self._log = folder / f"{module}.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, **(environ or {})},
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Lines printed by the child; None after the end of its output."""
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.terminate()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            if error is None:
                message = f"{self._name} did not end within {_END_S:g} s after the stop signal{self._log_tail()}"
                raise ChildError(message) from None

    def line(self, timeout_s: float = PATIENCE_S) -> str:
        """Return the next line of the child's output.

        Raises:
            ChildError: the child ended, or printed nothing for `timeout_s`.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self._name} printed nothing for {timeout_s:g} s{self._log_tail()}") from None
        if line is None:
            self._lines.put(None)
            raise ChildError(f"{self._name} ended with status {self._child.wait(_END_S)}{self._log_tail()}")
        return line

    def cpu_seconds(self) -> float:
        """Return the CPU time that all threads have used so far, in seconds."""
        return cpu_seconds(self._child.pid)

    def tree_cpu_seconds(self) -> float:
        """Return the CPU time that the process and its live descendants have used so far, in seconds."""
        total, pids = 0.0, [self._child.pid]
        while pids:
            pid = pids.pop()
            with suppress(OSError):  # the process has just ended
                total += cpu_seconds(pid)
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text("utf-8").split())
        return total

    def resident_bytes(self) -> int:
        """Return the resident memory in bytes."""
        return int(Path(f"/proc/{self._child.pid}/statm").read_text("utf-8").split()[1]) * _PAGE_BYTES

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _log_tail(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").splitlines()[-_ERROR_LINES:]
        return "".join(f"\n  {line}" for line in lines)
