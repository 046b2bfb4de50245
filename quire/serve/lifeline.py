"""A child process that does not outlive its supervisor, however that one ends.

The supervisor names itself in the environment; the child asks the kernel to kill it when that parent dies,
and then checks that the parent has not died in between. The child asks for itself, because code between fork
and exec (`preexec_fn`) is unsafe in a process with threads. Where there is no `prctl`, a thread looks after
the parent once in a while.
"""

import ctypes
import os
import signal
import sys
import threading
import time

ENVIRONMENT = "QUIRE_SUPERVISOR_PID"
"""Names the supervisor's process id to its children."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def attach() -> None:
    """Ties this process to its supervisor; does nothing in a process that was started by hand."""
    # Taken out, so that processes which this one starts do not believe that they are meant.
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
