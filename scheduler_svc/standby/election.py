"""Election: one of several schedulers on different machines holds a lease in etcd or Kubernetes, and leads.

A lease ends by itself if its holder does not renew it. The holder counts the duration from before its last request, so
it stops leading before another scheduler can acquire the lease, whatever the time of day is on their machines. Only the
speed of the clocks matters (`tenure`). The holder's process may be stopped at any time. The number under which it
leads (`leader_number`) fences frames that it had already begun to send.

Each acquisition stores a higher number in one transaction with the lease, so no two schedulers ever lead under the same
number. This is the fencing token of Burrows, The Chubby lock service (OSDI 2006).

If the holder's process dies on a living machine, its guard (`guard`) revokes the lease, so that no scheduler
waits for the duration.
"""

import math
import os
import threading
import time
from typing import Protocol

from scheduler_svc.standby.tenure import Tenure
from shared.logging import get_logger

_RENEWALS = 5
"""Number of attempts to renew or acquire a lease within its duration."""

_LOOK_S = 0.02
"""Interval at which the end of the thread is awaited."""

log = get_logger()


class LeaseError(Exception):
    """The store of the lease cannot be used now."""


UNUSABLE = (LeaseError, LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors of a store that cannot be used now. A store that responds with something else cannot be used either."""


class LeaseStore(Protocol):
    """A lease for one holder in a store that several machines reach. Calls block for at most the given time."""

    holder: str
    """Name of the other scheduler that was last found to hold the lease; empty if none was found."""

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

    def is_held(self, timeout_s: float) -> bool:
        """Return whether a scheduler holds the lease.

        Raises:
            LeaseError: the store cannot be used now.
        """
        ...

    def await_end(self, timeout_s: float) -> bool:
        """Wait until the lease that another scheduler holds has ended.

        Returns:
            Whether the lease may have ended; False after the timeout, or at once if the store does not report this.
        """
        ...

    @property
    def token(self) -> str:
        """Text by which another process can revoke the lease that is held, and no later lease."""
        ...

    def revoke(self, token: str, timeout_s: float) -> None:
        """End the lease with this token at once, if it has not ended.

        Raises:
            LeaseError: the store cannot be used now.
        """
        ...


class Guard(Protocol):
    """Process that revokes the lease when the scheduler's process dies."""

    def hold(self, token: str) -> None:
        """Set the token of the lease that is held; empty for none."""
        ...


class Election:
    """Acquires and renews the lease of one scheduler, in a thread of its own.

    Args:
        store: the lease.
        duration_s: time after its last renewal at which the lease ends, seconds.
        guard: revokes the lease when this process dies; None for no guard.
    """

    def __init__(self, store: LeaseStore, duration_s: float, guard: Guard | None = None) -> None:
        self._store, self._guard = store, guard
        self._tenure = Tenure(duration_s)
        self.interval_s = duration_s / _RENEWALS
        self.grace_s = 2 * duration_s
        """Time without a leader after which a scheduler stands that may have missed a part of the journal, seconds."""
        self.held_at = -math.inf
        """Time at which a scheduler was last seen to hold the lease while this one did not stand."""
        self._highest: int | None = None
        self.woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """File descriptor that becomes readable when this scheduler begins to lead."""
        self._last_holder = ""
        self._watches = False
        """Whether the thread waits for the end of another scheduler's lease."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self._reaches_store = True
        self._thread.start()

    @property
    def number(self) -> int:
        """Number under which this scheduler leads; 0 while it does not hold the lease."""
        return self._tenure.number

    def may_send(self, now: float) -> bool:
        """Return whether this scheduler leads at this time (`time.monotonic`), so that it may send something."""
        return self._tenure.may_send(now)

    def stand(self, highest: int | None) -> None:
        """Try to acquire the lease from now on, or not any more.

        Args:
            highest: highest leader number that this scheduler knows; None to let others acquire the lease.
        """
        self._highest = highest

    def end(self) -> None:
        """Release the lease if it is held. Call this after the sockets and folders of this scheduler are closed."""
        self._ended.set()
        # The watch may take as long as the lease, and the thread does nothing after it.
        while self._thread.is_alive() and not self._watches:
            self._thread.join(_LOOK_S)
        if self._tenure.number and self._tenure.held_until:
            try:
                self._store.revoke(self._store.token, self.interval_s)
            except UNUSABLE as error:
                log.warning("leader lease: not released; it ends by itself", error=repr(error))
        self._hold("")
        os.close(self.woken)

    def _hold(self, token: str) -> None:
        if self._guard is not None:
            self._guard.hold(token)

    def _note_holder(self) -> None:
        if self._store.holder != self._last_holder:
            self._last_holder = self._store.holder
            log.info("leader lease: another scheduler holds it", holder=self._last_holder)

    def _watch(self) -> bool:
        self._watches = True
        try:
            return self._store.await_end(self.interval_s)
        finally:
            self._watches = False

    def _run(self) -> None:
        began, has_ended = time.monotonic(), False
        # A watch that has lasted for the interval is followed by the next one at once.
        while not self._ended.wait(0.0 if has_ended else max(0.0, began + self.interval_s - time.monotonic())):
            began, has_ended = time.monotonic(), False
            try:
                if self.number:
                    if not self._store.renew(self.interval_s):
                        log.warning(
                            "leader lease: lost", leader_number=self.number, to=self._store.holder or "no scheduler yet"
                        )
                        self._tenure.lost()
                        self._hold("")
                        return
                    self._tenure.renewed(began)
                elif (highest := self._highest) is not None:
                    number = self._store.acquire(highest, self.interval_s)
                    if number:
                        self._hold(self._store.token)
                        self._tenure.acquired(number, began)
                        os.eventfd_write(self.woken, 1)
                    else:
                        self._note_holder()
                        has_ended = self._watch()
                elif self._store.is_held(self.interval_s):
                    self.held_at = time.monotonic()
            except UNUSABLE as error:
                if self._reaches_store:
                    log.warning("leader lease: its store cannot be used", error=repr(error))
                self._reaches_store = False
            else:
                if not self._reaches_store:
                    log.info("leader lease: its store can be used again")
                self._reaches_store = True
