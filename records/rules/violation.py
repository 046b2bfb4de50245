"""A broken promise."""

from typing import NamedTuple

from scheduler_svc.core.interface.records import Peer


class StreamName(NamedTuple):
    """The name of a stream in its front end."""

    frontend: Peer
    stream: int


class ViolationError(AssertionError):
    """A check of the simulator that failed.

    Args:
        check: the promise, by a short stable name.
        detail: what was seen.
        stream: the request concerned, if it is one.
    """

    def __init__(self, check: str, detail: str, stream: StreamName | None = None) -> None:
        super().__init__(f"{check}: {detail}")
        self.check = check
        self.detail = detail
        self.stream = stream
