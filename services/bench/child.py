"""The processes of `quire bench frontend`: they speak in lines, and none of them can keep the benchmark waiting."""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from shared.cpu_time import cpu_seconds

PATIENCE_S = 60.0
"""A child that says nothing for so long never will."""
_END_S = 10.0
_ERROR_LINES = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ChildError(RuntimeError):
    """A child ended or fell silent; the message holds the last lines of its log."""


class Child:
    """A process of ours, ended with the `with` block."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        """Runs `python -m module`; its log goes into `folder`."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._name = " ".join([module, *(each for each in arguments if not each.startswith("-"))])
        self._log = folder / f"{module}.log"
        with self._log.open("w") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """What it has said; None once it says no more."""
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
                message = f"{self._name} did not end within {_END_S:g} s of being told{self._last_words()}"
                raise ChildError(message) from None

    def line(self, timeout_s: float = PATIENCE_S) -> str:
        """The next line it prints.

        Raises:
            ChildError: it ended instead, or said nothing for `timeout_s`.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self._name} said nothing for {timeout_s:g} s{self._last_words()}") from None
        if line is None:
            self._lines.put(None)
            raise ChildError(f"{self._name} ended with status {self._child.wait(_END_S)}{self._last_words()}")
        return line

    def cpu_seconds(self) -> float:
        """CPU time so far, all threads."""
        return cpu_seconds(self._child.pid)

    def resident_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self._child.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def _listen(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._lines.put(line.strip())
        self._lines.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_ERROR_LINES:]
        return "".join(f"\n  {line}" for line in lines)
