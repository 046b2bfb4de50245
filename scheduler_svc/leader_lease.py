"""Leader lease: a file through which one of several schedulers on a machine leads, while the others are standbys.

The leader holds an exclusive lock on the file (flock). The kernel releases the lock when the leader's process exits for
any reason. Two schedulers therefore never lead at the same time, and no timeout is involved. A leader that is stopped
(SIGSTOP) or hangs retains its lock until it is killed or exits.

The file has two lines: the process of the last leader, and the addresses of the service. A new leader waits until this
process has exited, because the kernel may release its other locks, such as the lock on the journal, slightly later than
the lease. A scheduler with other addresses belongs to another service and is refused. Each standby holds a shared lock
on a second file, which shows the leader that a standby is waiting.
"""

import fcntl
import os
import re
import select
import stat
import threading
from pathlib import Path

from shared.config import ConfigError
from shared.logging import get_logger
from shared.process_watch import ProcessWatch, own_process

_MOST_BYTES = 4096
_CONTENT = re.compile(r"[^/\s]+/[^/\s]+/\d+/\d+\n.*\n")
"""Content of the file: a process as named by `shared.process_watch`, and addresses."""
_END_TIMEOUT_S = 10.0
"""Maximum wait until the last leader's process exits after it has lost the lease, in seconds."""

log = get_logger()


class LeaderLease:
    """Lease file of one scheduler.

    Args:
        path: the file; created if it does not exist.
        addresses: the addresses of the service, one line.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, addresses: str) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            standbys = path.with_name(f"{path.name}.standbys")
            self._standbys = os.open(standbys, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"leader_lease (--leader-lease): {error}; use a file that all schedulers of this service can write to"
            ) from None
        self._path, self._addresses = path, addresses
        if not stat.S_ISREG(os.fstat(self._file).st_mode) or not self._is_lease():
            raise ConfigError(f"leader_lease (--leader-lease): {path} is not a lease file; use a new file")
        self._decided = threading.Event()
        self._cancelled = False

    def acquire(self) -> bool:
        """Wait until this scheduler leads; return False if `cancel` was called before.

        Raises:
            ConfigError: a scheduler with other addresses leads.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._check_addresses()
            log.info("standby: another scheduler leads", lease=str(self._path))
            # Do not block the main thread while waiting for the lock, because that would delay signal handlers.
            threading.Thread(target=self._wait, name="leader-lease", daemon=True).start()
            fcntl.flock(self._standbys, fcntl.LOCK_SH)
            self._decided.wait()
            fcntl.flock(self._standbys, fcntl.LOCK_UN)
        if self._cancelled:
            return False
        last_leader = self._content().partition("\n")[0]
        if last_leader:
            _await_end(last_leader)
            log.warning("took over from another scheduler", lease=str(self._path))
        content = f"{own_process()}\n{self._addresses}\n".encode()
        os.pwrite(self._file, content, 0)
        os.ftruncate(self._file, len(content))
        return True

    def cancel(self) -> None:
        """Make a waiting `acquire` return False. May be called from a signal handler."""
        self._cancelled = True
        self._decided.set()

    @property
    def has_standby(self) -> bool:
        """Whether a standby waits; for the leader."""
        try:
            fcntl.flock(self._standbys, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._standbys, fcntl.LOCK_UN)
        return False

    def release(self) -> None:
        """Let a standby lead. Call this after the sockets and folders of this scheduler are closed."""
        os.ftruncate(self._file, 0)
        os.close(self._standbys)
        os.close(self._file)

    def _content(self) -> str:
        return os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace")

    def _is_lease(self) -> bool:
        content = self._content()
        return not content or _CONTENT.fullmatch(content) is not None

    def _check_addresses(self) -> None:
        leader, _, rest = self._content().partition("\n")
        watch = ProcessWatch.open(leader)
        if watch is None:
            return  # The new leader has not written the file yet.
        watch.close()
        addresses = rest.rstrip("\n")
        if addresses != self._addresses:
            raise ConfigError(
                f"leader_lease (--leader-lease): {self._path} is used by a scheduler at {addresses}, not at"
                f" {self._addresses}; use the same addresses, or another file for another service"
            )

    def _wait(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._decided.set()


def _await_end(process: str) -> None:
    """Wait until a process named as in `shared.process_watch` exits."""
    watch = ProcessWatch.open(process)
    if watch is None:
        return
    watch.close()
    try:
        descriptor = os.pidfd_open(int(process.split("/")[-2]))
    except OSError:
        return
    try:
        select.select([descriptor], [], [], _END_TIMEOUT_S)
    finally:
        os.close(descriptor)
