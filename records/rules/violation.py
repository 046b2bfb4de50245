"""The error for a broken promise, and the name of the request concerned."""

from typing import NamedTuple

from scheduler_svc.core.interface.records import Peer


class StreamName(NamedTuple):
    """Identifies a stream within its front end."""

    frontend: Peer
    stream: int


class ViolationError(AssertionError):
    """A check of the simulator that failed.

    Args:
        check: short, stable name of the promise.
        detail: what was observed.
        stream: the request concerned; None if the promise is not about one request.
    """

    def __init__(self, check: str, detail: str, stream: StreamName | None = None) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail
        self.stream = stream
