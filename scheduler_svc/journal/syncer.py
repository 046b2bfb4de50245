"""Files to the disk, in a thread of its own, so that planning goes on meanwhile.

What was written before a call of `sync` began is on the disk when it returns. So the thread takes the newest position
that it was given, syncs, and says so; whatever came in between waits for the next round. That is the group commit: the
slower the disk, the more goes with one sync.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable


class Syncer:
    """One thread. `woken`, a descriptor, becomes readable when `synced` has changed."""

    def __init__(self, sync_names: Callable[[], None], *, interval_s: float) -> None:
        """`sync_names` makes names of new files last; `interval_s` is the least time between two rounds."""
        self._sync_names = sync_names
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._wanted = 0
        self._descriptor = -1
        self._retired: list[int] = []
        self._new_names = False
        self._ending = False
        self.woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.synced = 0
        """Everything up to this position is on the disk."""
        self.failure: OSError | None = None
        """What went wrong last; whoever sees it begins a new file with all that counts and clears it."""
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
                self._condition.wait_for(lambda: self._wanted > self.synced or self._ending)
                if self._wanted <= self.synced:
                    return
                position, descriptor, new_names = self._wanted, self._descriptor, self._new_names
                retired, self._retired, self._new_names = self._retired, [], False
            failure: OSError | None = None
            try:
                for each in (*retired, descriptor):
                    os.fdatasync(each)
                if new_names:
                    self._sync_names()
            except OSError as error:
                failure = error
            for each in retired:
                os.close(each)
            with self._condition:
                self.synced, self.failure = position, failure or self.failure
                self._condition.notify_all()
            with contextlib.suppress(BlockingIOError):  # nobody has looked for a long time; one byte is as good as two
                os.write(self._wake, b"1")
            if self._interval_s and not self._ending:
                time.sleep(self._interval_s)
