"""Ends a child process when its supervisor dies, in whatever way.

The supervisor passes its process id in the environment. The child asks the kernel to kill it when that parent dies, and
then checks that the parent is still alive. The child itself does this, because code between fork and exec
(`preexec_fn`) is unsafe in a process with threads. Without `prctl`, a thread polls the parent.
"""

import ctypes
import os
import signal
import sys
import threading
import time

ENVIRONMENT = "QUIRE_SUPERVISOR_PID"
"""Environment variable with the supervisor's process id."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def attach() -> None:
    """Tie this process to its supervisor. Without a supervisor, do nothing."""
    # Remove the variable, so that child processes do not use it.
    supervisor = os.environ.pop(ENVIRONMENT, "")
    if not supervisor:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(int(supervisor),), name="lifeline", daemon=True).start()
    if os.getppid() != int(supervisor):
        os._exit(1)


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_S)
    os._exit(1)
