"""How many calls the process has in hand, whichever protocol they came by, and how many it may have."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.errors import RETRY_MS
from shared.errors import OverloadedError


class CallsInProgress:
    """A bound on calls; used from the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def one_more(self, *, limited: bool = True) -> Iterator[None]:
        """Counts a call while it lasts.

        Raises:
            OverloadedError: there are as many as there may be, and this one is `limited`.
        """
        self._count += 1
        try:
            if limited and self._count > self._most:
                raise OverloadedError(f"{self._most} calls are in progress already", retry_ms=RETRY_MS)
            yield
        finally:
            self._count -= 1
