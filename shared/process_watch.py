"""Whether another process of this machine has begun to die.

A killed process keeps its connections until the kernel has taken its memory back: a tenth of a second for a small
worker, seconds for one that holds a large KV cache or swap space in host memory. But the kernel marks it at once, and
anybody who sees it may read the mark. So a worker names its process, and a scheduler on the same machine looks.

The name holds the machine's boot and the process's PID namespace and start time beside its number, so that it names
nothing on another machine, in another container, or after the number was used again.
"""

import os
from pathlib import Path

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_NAMESPACE = _PROC / "self/ns/pid"
_MAX_NAME = 200

# Fields of /proc/PID/stat after the name in brackets (proc_pid_stat(5)), and flags of include/linux/sched.h.
_STATE, _FLAGS, _START_TIME = 0, 6, 19
_DEAD = (b"Z", b"X", b"x")
_EXITING, _DUMPS_CORE, _KILLED_BY_SIGNAL = 0x4, 0x200, 0x400
_DYING = _EXITING | _DUMPS_CORE | _KILLED_BY_SIGNAL


def own_process() -> str:
    """The name of this process; empty where the system does not tell."""
    try:
        start_time = _fields((_PROC / "self/stat").read_bytes())[_START_TIME].decode()
        return f"{_place()}/{os.getpid()}/{start_time}"
    except (OSError, IndexError):
        return ""


class ProcessWatch:
    """An eye on one process. Made by `open`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, name: str) -> "ProcessWatch | None":
        """An eye on the process of this name; None when it cannot be seen from here. `name` may be anything."""
        place, _, rest = name[:_MAX_NAME].rpartition("/")
        place, _, number = place.rpartition("/")
        try:
            if not (number.isascii() and number.isdecimal()) or place != _place():
                return None
            descriptor = os.open(_PROC / number / "stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        watch = cls(descriptor)
        if watch._start_time() != rest:
            watch.close()
            return None
        return watch

    def is_dying(self) -> bool:
        """Whether it has begun to die, or is dead. Some ten microseconds."""
        try:
            # The descriptor is the process's own: another one of the same number is not seen through it.
            fields = _fields(os.pread(self._descriptor, 1024, 0))
        except OSError:
            return True
        return len(fields) > _FLAGS and (fields[_STATE] in _DEAD or bool(int(fields[_FLAGS]) & _DYING))

    def close(self) -> None:
        """Looks no more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _start_time(self) -> str:
        try:
            fields = _fields(os.pread(self._descriptor, 1024, 0))
        except OSError:
            return ""
        return fields[_START_TIME].decode() if len(fields) > _START_TIME else ""


def _place() -> str:
    """This machine since its start, and the PID namespace in it."""
    return f"{_BOOT_ID.read_text().strip()}/{os.readlink(_NAMESPACE)}"


def _fields(stat: bytes) -> list[bytes]:
    # The command's name may hold anything, brackets and blanks too.
    return stat.rpartition(b")")[2].split()
