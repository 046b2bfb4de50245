"""CPU time of another process."""

import time


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that all threads of a process have used so far, in seconds.

    Raises:
        OSError: the process does not exist.
    """
    # Use the process clock as in clock_getcpuclockid(3), because the resolution of /proc is only 10 ms.
    return time.clock_gettime(~pid << 3 | 2)
