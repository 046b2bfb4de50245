"""How much CPU time another process has used."""

import time


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, of all its threads, in seconds.

    Raises:
        OSError: there is no such process.
    """
    # Its clock, as clock_getcpuclockid(3) makes it; /proc counts in hundredths of a second.
    return time.clock_gettime(~pid << 3 | 2)
