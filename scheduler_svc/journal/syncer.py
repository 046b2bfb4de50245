"""Syncer: flushes files to the disk (fsync) in its own thread, so that the scheduler's loop does not wait.

All data written before an fsync starts is on the disk when it returns. In each round the thread takes the newest
position, syncs, and stores that position. Data that is written during a sync waits for the next round (group commit).
The slower the disk is, the more data each sync covers.
"""

import contextlib
import os
import threading
from collections.abc import Callable


class Syncer:
    """Thread that syncs files. The file descriptor `woken` becomes readable when `synced` changes."""

    def __init__(self, sync_names: Callable[[], None], *, interval_s: float) -> None:
        """Start the thread.

        Args:
            sync_names: makes the names of new files durable.
            interval_s: minimum time between two rounds, in seconds.
        """
        self._sync_names = sync_names
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._wanted = self._tried = 0
        self._descriptor = -1
        self._retired: list[int] = []
        """Full files, which must be synced too, and then closed."""
        self._abandoned: list[int] = []
        """Failed files, which are only closed."""
        self._new_names = False
        self._ending = False
        self.woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.synced = 0
        """Position up to which all data is on the disk.

        It does not advance between a failure and `start_over`, because the kernel reports a lost write only once and
        the file's next fsync succeeds.
        """
        self.failure: OSError | None = None
        """First error since `start_over`."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def want(self, descriptor: int, position: int) -> None:
        """Ask for all data up to `position` to be synced; `descriptor` is the current file."""
        with self._condition:
            if self._descriptor not in (descriptor, -1):
                self._retired.append(self._descriptor)
                self._new_names = True
            elif self._descriptor == -1:
                self._new_names = True
            self._descriptor, self._wanted = descriptor, position
            self._condition.notify()

    def start_over(self) -> None:
        """Abandon all files after a failure; a new file with all live entries follows."""
        with self._condition:
            self._abandoned += self._retired
            if self._descriptor != -1:
                self._abandoned.append(self._descriptor)
            self._retired, self._descriptor = [], -1
            self._wanted, self.failure = self._tried, None

    def acknowledge(self) -> None:
        """Clear `woken` until `synced` changes again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)

    def close(self) -> None:
        """Stop the thread after a last round."""
        with self._condition:
            self._ending = True
            self._condition.notify_all()
        self._thread.join()
        os.close(self.woken)
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted > self._tried or self._ending)
                if self._wanted <= self._tried:
                    return
                position, descriptor, new_names = self._wanted, self._descriptor, self._new_names
                retired, self._retired, self._new_names = self._retired, [], False
                abandoned, self._abandoned = self._abandoned, []
            failure: OSError | None = None
            try:
                for each in (*retired, descriptor):
                    os.fdatasync(each)
                if new_names:
                    self._sync_names()
            except OSError as error:
                failure = error
            for each in (*retired, *abandoned):
                os.close(each)
            with self._condition:
                self._tried = position
                self.failure = self.failure or failure
                if self.failure is None:
                    self.synced = position
            # The pipe is full, so its reader will wake up anyway.
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"1")
            with self._condition:
                self._condition.wait_for(lambda: self._ending, self._interval_s)
