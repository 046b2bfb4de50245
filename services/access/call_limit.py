"""Limit of concurrent calls of this process, over all protocols."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.errors import RETRY_MS
from shared.errors import OverloadedError


class CallsInProgress:
    """Counter of calls with an upper limit; used from the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def track(self, *, limited: bool = True) -> Iterator[None]:
        """Count a call for the duration of the `with` block.

        Raises:
            OverloadedError: the limit is reached, and this call is `limited`.
        """
        self._count += 1
        try:
            if limited and self._count > self._most:
                raise OverloadedError(
                    f"calls in progress: the limit of {self._most} is reached; try again later", retry_ms=RETRY_MS
                )
            yield
        finally:
            self._count -= 1
