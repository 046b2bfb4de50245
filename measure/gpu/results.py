"""One part's JSON file: results by item, with the device and the commit.

The file is written after every item, so that nothing is lost if the process dies. An item may terminate the process:
its kernel never returns, or the device stops responding. Such an item is recorded as *broken* and not run again. The
next process continues with the others.
"""

import hashlib
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Figures = dict[str, float | int | str]

ROOT = Path(__file__).parents[2]
_SOURCES = ("kernels", "worker_svc", "measure/gpu")
_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy", "pyzmq")


ENDED = 4
"""Exit code after an item has terminated the process; the next process continues."""
_PATIENCE = 6.0
_LEAST_PATIENCE_S = 120.0
"""An item counts as hung after this many times its expected duration, and after at least this many seconds."""


class DeviceLostError(Exception):
    """The device no longer responds in this process."""


class Results:
    """Current results of a part; each new item is written immediately."""

    def __init__(self, path: Path, *, rehearsal: bool, budget_s: float) -> None:
        """Open the file; no item starts later than `budget_s` from now."""
        self._path = path
        self._deadline = time.monotonic() + budget_s
        self.skipped: list[str] = []
        """Items that were skipped for lack of time."""
        self.failed: list[str] = []
        header = {"rehearsal": rehearsal, "commit": _commit(), "device": device_name(), "versions": _versions()}
        self._document: dict[str, object] = {**header, "items": {}, "failed": {}, "broken": {}}
        if path.is_file():
            earlier = json.loads(path.read_text())
            if {key: earlier.get(key) for key in header} == header:
                self._document = earlier

    @property
    def path(self) -> Path:
        """File of the results."""
        return self._path

    @property
    def items(self) -> dict[str, Figures]:
        """Results of each finished item."""
        items = self._document["items"]
        assert isinstance(items, dict)
        return items

    @property
    def _failures(self) -> dict[str, str]:
        failures = self._document["failed"]
        assert isinstance(failures, dict)
        return failures

    @property
    def _broken(self) -> dict[str, str]:
        broken = self._document["broken"]
        assert isinstance(broken, dict)
        return broken

    def all_done(self, names: Iterable[str]) -> bool:
        left = [name for name in names if name not in self.items]
        self.failed += [name for name in left if name in self._broken]
        return not set(left) - set(self._broken) or time.monotonic() > self._deadline

    def run(self, name: str, measure: Callable[[], Figures], expected_s: float = 0.0) -> None:
        """Run an item, unless it is done or would take longer than the time left.

        An item that fails is recorded and printed, and the others still run.

        Raises:
            DeviceLostError: no other item can run in this process.
        """
        if name in self.items:
            return
        if self.is_broken(name):
            return
        if time.monotonic() + expected_s > self._deadline:
            self.skipped.append(name)
            return
        began = time.monotonic()
        try:
            with self.patience(name, expected_s):
                found = measure()
        except Exception as error:
            self.fail(name, error)
            if _device_is_lost():
                self._broken[name] = self._failures.pop(name)
                self._write()
                raise DeviceLostError(name) from error
            return
        print(f"  {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in found.items()), flush=True)
        self.items[name] = {**found, "took_s": round(time.monotonic() - began, 1)}
        self._failures.pop(name, None)
        self._write()

    def is_broken(self, name: str) -> bool:
        """Return whether the item has terminated a process; if so, print it as a failure."""
        if name not in self._broken:
            return False
        self.failed.append(name)
        print(f"  {name}: not run again, because it terminated a process: {self._broken[name]}", flush=True)
        return True

    @contextmanager
    def patience(self, name: str, expected_s: float) -> Iterator[None]:
        """Terminate the process if the block takes too long."""
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * expected_s)
        watchdog = threading.Timer(patience_s, self._end, (name, f"it hung for {patience_s:.0f} s"))
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def fail(self, name: str, error: Exception) -> None:
        """Record and print the failure of an item, or of preparing several items."""
        self.failed.append(name)
        self._failures[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}: FAILED {self._failures[name]}", flush=True)
        self._write()

    def _end(self, name: str, why: str) -> None:
        """Terminate the process, because the thread that runs the item cannot be stopped."""
        print(f"  {name}: FAILED {why}", flush=True)
        self._broken[name] = why
        self._write()
        os._exit(ENDED)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".tmp")
        written.write_text(json.dumps(self._document, indent=1) + "\n")
        written.replace(self._path)


def device_name() -> str:
    """Return the GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"


def _device_is_lost() -> bool:
    """Return whether the device stays unusable for the rest of the process, as after an illegal memory access."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False


def _commit() -> str:
    """Return the commit, or a hash over the sources in a tree without git."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        if found.returncode == 0 and found.stdout.strip():
            return found.stdout.strip()
    except OSError:
        pass
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return f"sources {digest.hexdigest()[:16]}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
