"""Files to the disk, in a thread of its own, so that planning goes on meanwhile.

What was written before a call of `sync` began is on the disk when it returns. So the thread takes the newest position
that it was given, syncs, and says so; whatever came in between waits for the next round. That is the group commit: the
slower the disk, the more goes with one sync.
"""

import contextlib
import os
import threading
from collections.abc import Callable


class Syncer:
    """One thread. `woken`, a descriptor, becomes readable when `synced` has changed."""

    def __init__(self, sync_names: Callable[[], None], *, interval_s: float) -> None:
        """`sync_names` makes names of new files last; `interval_s` is the least time between two rounds."""
        self._sync_names = sync_names
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._wanted = self._tried = 0
        self._descriptor = -1
        self._retired: list[int] = []
        """Files that are full; the disk must have them, too."""
        self._abandoned: list[int] = []
        """Files that failed; they are only closed."""
        self._new_names = False
        self._ending = False
        self.woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.synced = 0
        """Everything up to this position is on the disk. Stands still from a failure until `start_over`: a kernel tells
        of a lost write once, and the next sync of the file succeeds without it."""
        self.failure: OSError | None = None
        """What went wrong first."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def want(self, descriptor: int, position: int) -> None:
        """Everything up to `position` is to go to the disk; `descriptor` is the file that is written now."""
        with self._condition:
            if self._descriptor not in (descriptor, -1):
                self._retired.append(self._descriptor)
                self._new_names = True
            elif self._descriptor == -1:
                self._new_names = True
            self._descriptor, self._wanted = descriptor, position
            self._condition.notify()

    def start_over(self) -> None:
        """After a failure: files given so far are let go; one that begins with all that counts is about to follow."""
        with self._condition:
            self._abandoned += self._retired
            if self._descriptor != -1:
                self._abandoned.append(self._descriptor)
            self._retired, self._descriptor = [], -1
            self._wanted, self.failure = self._tried, None

    def acknowledge(self) -> None:
        """Makes `woken` unreadable until there is something new."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)

    def close(self) -> None:
        """Ends the thread after a last round."""
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
            with contextlib.suppress(BlockingIOError):  # nobody has looked for a long time; one byte is as good as two
                os.write(self._wake, b"1")
            with self._condition:
                self._condition.wait_for(lambda: self._ending, self._interval_s)
