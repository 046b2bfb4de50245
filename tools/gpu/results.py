"""The JSON of one part: what was measured on which device at which commit, item by item."""

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

Figures = dict[str, float | int | str]

ROOT = Path(__file__).parents[2]
_SOURCES = ("kernels", "worker_svc", "tools/gpu")
_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy", "pyzmq")


class Results:
    """What a part has given so far; every new item is written at once."""

    def __init__(self, path: Path, *, rehearsal: bool, budget_s: float) -> None:
        """`budget_s` after now no item is begun any more."""
        self._path = path
        self._deadline = time.monotonic() + budget_s
        self.skipped: list[str] = []
        """Items for which there was no time."""
        self.failed: list[str] = []
        header = {"rehearsal": rehearsal, "commit": _commit(), "device": device_name(), "versions": _versions()}
        self._document: dict[str, object] = {**header, "items": {}}
        if path.is_file():
            earlier = json.loads(path.read_text())
            if {key: earlier.get(key) for key in header} == header:
                self._document = earlier

    @property
    def items(self) -> dict[str, Figures]:
        """The figures of each item that is done."""
        items = self._document["items"]
        assert isinstance(items, dict)
        return items

    def all_done(self, names: Iterable[str]) -> bool:
        """Whether nothing is left to do of these, or there is no time to."""
        return all(name in self.items for name in names) or time.monotonic() > self._deadline

    def run(self, name: str, measure: Callable[[], Figures], expected_s: float = 0.0) -> None:
        """Does an item, unless it is done or would take longer than there is time. One that fails is noted and told,
        and does not keep the others from being done."""
        if name in self.items:
            return
        if time.monotonic() + expected_s > self._deadline:
            self.skipped.append(name)
            return
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:
            self.failed.append(name)
            print(f"  {name}: FAILED {type(error).__name__}: {error}", flush=True)
            return
        print(f"  {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in found.items()), flush=True)
        self.items[name] = {**found, "took_s": round(time.monotonic() - began, 1)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._document, indent=1) + "\n")


def device_name() -> str:
    """The GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"


def _commit() -> str:
    """The commit; where there is no git, as in a tree that was copied to a machine, what the sources amount to."""
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
