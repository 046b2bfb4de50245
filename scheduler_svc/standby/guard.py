"""Guard: a process that revokes the leader lease when the scheduler's process dies, for example by SIGKILL.

The guard waits for the end of its standard input, which is a pipe from the scheduler. The kernel closes the pipe when
the scheduler's process exits for any reason, after its threads can no longer send anything. The guard then revokes the
lease by the token that it received last. A token identifies one lease, so the lease of a successor is never revoked. If
the scheduler is only stopped (SIGSTOP), or if the guard dies too, the lease ends by itself.
"""

import signal
import subprocess
import sys
import time

from scheduler_svc.standby.election import UNUSABLE
from scheduler_svc.standby.stores import open_store
from shared.logging import configure_logging, get_logger

_ATTEMPT_S = 0.5


class GuardProcess:
    """The scheduler's side of its guard.

    Args:
        lease: value of --leader-lease.
        holder: name of the scheduler in the store.
        duration_s: duration of the lease, seconds.
    """

    def __init__(self, lease: str, holder: str, duration_s: float) -> None:
        command = [sys.executable, "-P", "-m", "scheduler_svc.standby.guard", lease, holder, str(duration_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    def hold(self, token: str) -> None:
        """Set the token of the lease that is held; empty for none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{token}\n".encode())
        except OSError as error:
            get_logger().warning(
                "leader lease: its guard has died; if this process is killed, the lease ends by itself",
                error=str(error),
            )

    def close(self) -> None:
        """End the guard. Call this after the lease was released."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Wait for the end of the scheduler's process, and revoke its lease."""
    # A signal to the process group must not end the guard before the scheduler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure_logging("quire-lease-guard")
    lease, holder, duration = sys.argv[1:]
    store = open_store(lease, holder, float(duration))
    token = ""
    for line in sys.stdin:
        token = line.strip()
    # After this time, the lease has ended by itself.
    end = time.monotonic() + 2 * float(duration)
    while token and time.monotonic() < end:
        try:
            store.revoke(token, _ATTEMPT_S)
        except UNUSABLE as error:
            get_logger().warning("leader lease: not revoked yet", error=repr(error))
            time.sleep(_ATTEMPT_S / 5)
        else:
            get_logger().warning("leader lease: revoked, because the scheduler's process has died", holder=holder)
            token = ""
    return 0


if __name__ == "__main__":
    sys.exit(main())
