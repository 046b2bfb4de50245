"""Faults that a worker process under test can produce.

Python runs this file at the start of every process whose PYTHONPATH contains its folder. It is not part of the product.

* SIGUSR1 blocks the main thread, because signal handlers run there. The loop blocks while ZeroMQ's threads continue.
* CHAOS_PROXIES names a folder of sockets, one per worker, which it uses instead of the scheduler's.
* CHAOS_EAGER lets the worker say hello without a pause.
* CHAOS_COPIES names a folder. A file "out" or "in" in it terminates the process in the middle of a copy of KV blocks in
  this direction. A file "scheduler" with a process ID terminates that process in the middle of a copy to the device.
* CHAOS_DISK names a folder. A file "write" or "read" in it terminates the process in the middle of writing or reading a
  block's file. While there is a file "full" in it, the disk is full; while there is a file "slow", a read takes 2 s.
* CHAOS_POISON is a sequence of tokens. A step whose batch contains it terminates the process, like a kernel fault.
"""

import errno
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_arguments = sys.orig_argv
_PREFIX = "--worker-id="


def _hang(_number: int, _frame: object) -> None:
    while True:
        time.sleep(3600)


def _through_proxy(sockets: Any) -> None:
    connect, folder = sockets.connect_dealer, os.environ["CHAOS_PROXIES"]
    name = next(each.removeprefix(_PREFIX) for each in _arguments if each.startswith(_PREFIX))
    sockets.connect_dealer = lambda context, _address, **options: connect(context, f"ipc://{folder}/{name}", **options)


def _eager(link: Any) -> None:
    link._HELLO_INTERVAL_S = 0.0


def _poisonable(batch: Any) -> None:
    build, poison = batch.BatchBuilder.build, f",{os.environ['CHAOS_POISON']},"

    def watched(*arguments: Any) -> Any:
        built = build(*arguments)
        if built is not None and poison in f",{','.join(map(str, built.input_ids.tolist()))},":
            os.kill(os.getpid(), signal.SIGKILL)
        return built

    batch.BatchBuilder.build = watched


def _mortal(swap: Any) -> None:
    folder, copy = Path(os.environ["CHAOS_COPIES"]), swap.HostPool._copy_now

    def halved(self: Any, source: Any, sources: Any, target: Any, targets: Any) -> Any:
        is_out = source is self._device
        for victim in ("out",) if is_out else ("in", "scheduler"):
            order = folder / victim
            if len(sources) < 2 or not order.exists():
                continue
            pid = int(order.read_text()) if victim == "scheduler" else os.getpid()
            order.unlink()
            half = slice(len(sources) // 2)
            copy(source, sources[half], target, targets[half])
            os.kill(pid, signal.SIGKILL)
        return copy(source, sources, target, targets)

    swap.HostPool._copy_now = halved


def _faulty_disk(disk_files: Any) -> None:
    folder, files = Path(os.environ["CHAOS_DISK"]), disk_files.BlockFiles
    begin, write, read = files.__init__, files.write, files.read

    def begun(self: Any, *arguments: Any, **settings: Any) -> None:
        if (folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begin(self, *arguments, **settings)

    def dies(order: Path) -> bool:
        found = order.exists()
        order.unlink(missing_ok=True)
        return found

    def written(self: Any, block: Any, content: memoryview) -> None:
        if dies(folder / "write"):
            self._path(block.slot, "tmp").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, block, content)

    def read_in(self: Any, block: Any, into: memoryview) -> None:
        if dies(folder / "read"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "slow").exists():
            time.sleep(2.0)
        read(self, block, into)

    files.__init__, files.write, files.read = begun, written, read_in


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches modules right after they are loaded."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if (change := self._changes.pop(name, None)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if "worker" in _arguments:
    signal.signal(signal.SIGUSR1, _hang)
    changes: dict[str, Callable[[Any], None]] = {}
    if os.environ.get("CHAOS_PROXIES"):
        changes["shared.sockets"] = _through_proxy
    if os.environ.get("CHAOS_EAGER"):
        changes["worker_svc.link.connection"] = _eager
    if os.environ.get("CHAOS_COPIES"):
        changes["worker_svc.memory.swap"] = _mortal
    if os.environ.get("CHAOS_DISK"):
        changes["worker_svc.memory.disk_files"] = _faulty_disk
    if os.environ.get("CHAOS_POISON"):
        changes["worker_svc.execution.batch"] = _poisonable
    sys.meta_path.insert(0, _AfterImport(changes))
