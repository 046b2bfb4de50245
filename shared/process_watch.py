"""Detects that another process on this machine is dying.

A killed process's connections are closed only after the kernel has freed its memory. This takes a tenth of a second for
a small worker, or seconds with a large KV cache or swap space in host memory. However, the kernel immediately marks the
process as exiting, which other processes can see. A worker therefore sends its process name, and a scheduler on the
same machine checks this mark.

The name contains the machine's boot id, and the PID namespace, number and start time of the process. It is therefore
invalid on another machine, in another container, or after the number was reused.
"""

import os
from pathlib import Path

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_NAMESPACE = _PROC / "self/ns/pid"
_MAX_NAME = 200

# Fields of /proc/PID/stat after the bracketed name, see proc_pid_stat(5), and flags from include/linux/sched.h.
_STATE, _FLAGS, _START_TIME = 0, 6, 19
_DEAD = (b"Z", b"X", b"x")
_EXITING, _DUMPS_CORE, _KILLED_BY_SIGNAL = 0x4, 0x200, 0x400
_DYING = _EXITING | _DUMPS_CORE | _KILLED_BY_SIGNAL


def own_process() -> str:
    """Return the name of this process; empty if the system does not provide it."""
    try:
        start_time = _fields((_PROC / "self/stat").read_bytes())[_START_TIME].decode()
        return f"{_host_id()}/{os.getpid()}/{start_time}"
    except (OSError, IndexError):
        return ""


class ProcessWatch:
    """Detects the exit of one process. Use `open` to create it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, name: str) -> "ProcessWatch | None":
        """Return a watch on the process with this name (any text); None if no such process is visible."""
        place, _, rest = name[:_MAX_NAME].rpartition("/")
        place, _, number = place.rpartition("/")
        try:
            if not (number.isascii() and number.isdecimal()) or place != _host_id():
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
        """Return whether the process is dying or dead. Takes about ten microseconds."""
        try:
            # The descriptor refers to this process, even if the process number is reused later.
            fields = _fields(os.pread(self._descriptor, 1024, 0))
        except OSError:
            return True
        return len(fields) > _FLAGS and (fields[_STATE] in _DEAD or bool(int(fields[_FLAGS]) & _DYING))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _start_time(self) -> str:
        try:
            fields = _fields(os.pread(self._descriptor, 1024, 0))
        except OSError:
            return ""
        return fields[_START_TIME].decode() if len(fields) > _START_TIME else ""


def _host_id() -> str:
    """Return the boot id of this machine and the PID namespace."""
    return f"{_BOOT_ID.read_text('utf-8').strip()}/{os.readlink(_NAMESPACE)}"


def _fields(stat: bytes) -> list[bytes]:
    # The command name may contain brackets and spaces.
    return stat.rpartition(b")")[2].split()
