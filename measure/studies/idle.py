"""Cost of an idle `quire serve`: the time until it is ready, then each thread's CPU time and wake-ups.

    python -m measure.studies.idle [--seconds 45] [FLAGS of quire serve]

CPU time comes from Linux's scheduler, in nanoseconds; a wake-up is a voluntary context switch.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ROLES = ("worker", "scheduler", "frontend", "serve")
_SETTLING_S = 5.0
"""Time from the ready line to the first reading, in seconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU time and wake-ups of one thread so far."""

    process: str
    thread: str
    cpu_ns: int
    wake_ups: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Usage of one thread or process per second."""

    cores: float
    wake_ups: float


Readings = dict[tuple[int, int], Usage]
"""Usage by process ID and thread ID."""


def read(root: int) -> Readings:
    """Return the usage of all threads in a process and its descendants. Threads that exit during the reading are
    omitted.
    """
    found: Readings = {}
    for pid in _descendants(root):
        arguments = (_PROC / str(pid) / "cmdline").read_text().split("\0")
        process = next((role for role in _ROLES if role in arguments), arguments[0])
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
                cpu_ns = int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue
            found[pid, int(task.name)] = Usage(process, fields["Name"], cpu_ns, int(fields["voluntary_ctxt_switches"]))
    return found


def rates(before: Readings, after: Readings, seconds: float) -> dict[tuple[str, str], Rate]:
    """Return the rates between two readings by process and thread. Threads with the same name are summed."""
    found: dict[tuple[str, str], Rate] = {}
    for key, usage in after.items():
        start = before.get(key, Usage(usage.process, usage.thread, 0, 0))
        name = (usage.process, usage.thread)
        so_far = found.get(name, Rate(0.0, 0.0))
        found[name] = Rate(
            so_far.cores + (usage.cpu_ns - start.cpu_ns) / 1e9 / seconds,
            so_far.wake_ups + (usage.wake_ups - start.wake_ups) / seconds,
        )
    return found


def _descendants(root: int) -> Iterator[int]:
    yield root
    for task in (_PROC / str(root) / "task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _descendants(int(child))


def main(arguments: list[str] | None = None) -> int:
    """Start `quire serve`, measure it, and stop it; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m measure.studies.idle", description="Measure an idle quire serve.")
    parser.add_argument("--seconds", type=float, default=45.0, help="time of the measurement (45)")
    options, flags = parser.parse_known_args(arguments)
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "quire_server.cli.main", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as service:
        try:
            assert service.stdout is not None
            if not service.stdout.readline().startswith("ready"):
                print(f"quire serve: did not start; try {' '.join(command)}", file=sys.stderr)
                return 1
            print(f"ready after {time.monotonic() - began:.1f} s on {os.cpu_count()} cores")
            started: dict[str, float] = {}
            for usage in read(service.pid).values():
                started[usage.process] = started.get(usage.process, 0.0) + usage.cpu_ns / 1e9
            print("CPU time until then: " + ", ".join(f"{name} {cpu_s:.2f} s" for name, cpu_s in started.items()))
            time.sleep(_SETTLING_S)
            before = read(service.pid)
            time.sleep(options.seconds)
            found = rates(before, read(service.pid), options.seconds)
        finally:
            service.terminate()
    for (process, thread), rate in sorted(found.items()):
        if rate.wake_ups >= 0.1:
            print(f"{process:10} {thread:16} {100 * rate.cores:7.3f} % of a core {rate.wake_ups:6.1f} wake-ups/s")
    for process in sorted({process for process, _ in found}):
        cores = sum(rate.cores for (name, _), rate in found.items() if name == process)
        print(f"{process:10} {'all':16} {100 * cores:7.3f} %")
    print(f"{'service':10} {'all':16} {100 * sum(rate.cores for rate in found.values()):7.3f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
