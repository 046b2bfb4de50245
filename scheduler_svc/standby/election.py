"""Election: one of several schedulers on different machines holds a lease in etcd or Kubernetes, and leads.

A lease ends by itself if its holder does not renew it. The holder counts the duration from before its last request, so
it stops leading before another scheduler can acquire the lease, whatever the time of day is on their machines. Only the
speed of the clocks matters (`_MARGIN`). The holder's process may be stopped at any time. The number under which it
leads (`leader_number`) fences frames that it had already begun to send.

Each acquisition stores a higher number in one transaction with the lease, so no two schedulers ever lead under the same
number. This is the fencing token of Burrows, The Chubby lock service (OSDI 2006).
"""

import threading
import time
from typing import Protocol

from shared.logging import get_logger

_MARGIN = 0.1
"""Share of the duration by which the holder stops leading earlier, for clocks that run at different speeds."""
_RENEWALS = 5
"""Number of attempts to renew or acquire a lease within its duration."""

log = get_logger()


class LeaseError(Exception):
    """The store of the lease cannot be used now."""


class LeaseStore(Protocol):
    """A lease for one holder in a store that several machines reach. Calls block for at most the given time."""

    def acquire(self, highest: int, timeout_s: float) -> int:
        """Try once to acquire the lease.

        Args:
            highest: highest leader number that the caller knows; 0 for none.
            timeout_s: maximum duration of the call, seconds.

        Returns:
            The number under which the caller leads, above `highest` and all earlier numbers; 0 if another scheduler
            holds the lease.

        Raises:
            LeaseError: the store cannot be used now.
        """
        ...

    def renew(self, timeout_s: float) -> bool:
        """Renew the lease; return False if it has ended.

        Raises:
            LeaseError: the store cannot be used now.
        """
        ...

    def release(self, timeout_s: float) -> None:
        """End the lease at once.

        Raises:
            LeaseError: the store cannot be used now.
        """
        ...


class Election:
    """Acquires and renews the lease of one scheduler, in a thread of its own.

    Args:
        store: the lease.
        duration_s: time after its last renewal at which the lease ends, seconds.
    """

    def __init__(self, store: LeaseStore, duration_s: float) -> None:
        self._store = store
        self._valid_s = duration_s * (1 - _MARGIN)
        self.interval_s = duration_s / _RENEWALS
        self.grace_s = 2 * duration_s
        """Time without a leader after which a scheduler stands that may have missed a part of the journal, seconds."""
        self.number = 0
        """Number under which this scheduler leads; 0 while it does not hold the lease."""
        self.held_until = 0.0
        """Time (`time.monotonic`) after which this scheduler must not send anything more."""
        self._highest: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._reaches_store = True
        self._thread.start()

    def stand(self, highest: int) -> None:
        """Try to acquire the lease from now on; `highest` is the highest leader number that this scheduler knows."""
        self._highest = highest

    def end(self) -> None:
        """Release the lease if it is held. Call this after the sockets and folders of this scheduler are closed."""
        self._ended.set()
        self._thread.join()
        if self.number and self.held_until:
            try:
                self._store.release(self.interval_s)
            except LeaseError as error:
                log.warning("leader lease: not released; it ends by itself", error=str(error))

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            began = time.monotonic()
            try:
                if self.number:
                    if not self._store.renew(self.interval_s):
                        log.warning("leader lease: it has ended")
                        self.held_until = 0.0
                        return
                    self.held_until = began + self._valid_s
                elif self._highest is not None:
                    number = self._store.acquire(self._highest, self.interval_s)
                    self.held_until = began + self._valid_s
                    self.number = number
            # A store that responds with something else cannot be used either.
            except (LeaseError, LookupError, TypeError, ValueError) as error:
                if self._reaches_store:
                    log.warning("leader lease: its store cannot be used", error=repr(error))
                self._reaches_store = False
            else:
                if not self._reaches_store:
                    log.info("leader lease: its store can be used again")
                self._reaches_store = True
